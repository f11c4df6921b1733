"""Kinds of tensors that the device lacks: strided nested, sparse and quantized ones. Each use is one clear error.

PyTorch has dispatch keys for them, where nobody registers kernels for this device. Its own words for that are a page
long; and where autograd asks for the sizes of a nested tensor, an error ends the process. What makes such tensors of
strided ones is refused in `eager.kernels.host_only`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_KINDS = {
    "NestedTensorPrivateUse1": "strided nested",
    "SparsePrivateUse1": "torch.sparse_coo",
    "SparseCsrPrivateUse1": "torch.sparse_csr",
    "QuantizedPrivateUse1": "quantized",
}
# PyTorch makes these of other operators for any key, so that no fallback is asked; they get theirs from the layout.
_MAKE_COMPRESSED = (
    "_sparse_compressed_tensor_unsafe",
    *(f"_sparse_{layout}_tensor_unsafe" for layout in ("csr", "csc", "bsr", "bsc")),
    "sparse_compressed_tensor.comp_plain_value",
    "sparse_compressed_tensor.comp_plain_value_size",
)
# Describe a nested tensor; PyTorch's kernels for the CPU read nothing but what the tensor itself holds.
_DESCRIBE_NESTED = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")

_fallbacks = torch.library.Library("_", "IMPL")
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    for key, kind in _KINDS.items():
        _fallbacks.fallback(_refuse_any(kind), key)
    for name in _MAKE_COMPRESSED:
        _library.impl(name, functools.partial(_refuse_any("torch.sparse_csr"), name), "SparseCsrPrivateUse1")
    for name in _DESCRIBE_NESTED:
        _library.impl(name, _of_cpu(name), "NestedTensorPrivateUse1")


def _refuse_any(kind: str) -> Callable[..., NoReturn]:
    def refuse(operator: Any, *args: Any, **kwargs: Any) -> NoReturn:
        from torch_tpu.tensor.errors import no_such_tensors

        raise no_such_tensors(kind, operator if isinstance(operator, str) else operator.name())

    return refuse


def _of_cpu(name: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)
    redispatch = getattr(torch.ops.aten, name).default.redispatch

    def describe(tensor: torch.Tensor) -> Any:
        return redispatch(keys, tensor)

    return describe
