"""In place of PyTorch's kernels that read the memory of their arguments: other ones, the CPU, or an error.

A tensor of the device has no memory at its data pointer; those kernels would end the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.host.fallback import run_on_cpu
from torch_tpu.eager.kernel_table import HANDWRITTEN, kernel
from torch_tpu.tensor.errors import no_such_tensors
from torch_tpu.tensor.transfer import from_host

aten = torch.ops.aten


class CpuKernel:
    """The kernel of an overload that runs on the CPU."""

    reason = "PyTorch's kernel reads host memory"

    def __init__(self, func: OpOverload) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_on_cpu(self.func, args, kwargs, self.reason)


class Refused:
    """The kernel of an overload that takes or makes what is no tensor of numbers, so that it can't move."""

    def __init__(self, func: OpOverload) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.func} is not implemented for the tpu device: its weights are packed for a library of the CPU. "
            "Move its inputs to the CPU with .cpu()."
        )


for _func in (
    aten._reshape_from_tensor.default,
    aten._rowwise_prune.default,
    aten._sobol_engine_draw.default,
    aten._sobol_engine_ff_.default,
    aten._sobol_engine_initialize_state_.default,
    aten._sobol_engine_scramble_.default,
    aten.choose_qparams_optimized.default,
):
    kernel(_func.name().partition("::")[2])(CpuKernel(_func))

for _func in (
    aten.fbgemm_linear_int8_weight.default,
    aten.fbgemm_linear_int8_weight_fp32_activation.default,
    aten.fbgemm_linear_quantize_weight.default,
    aten.fbgemm_pack_gemm_matrix_fp16.default,
    aten.fbgemm_pack_quantized_matrix.default,
    aten.fbgemm_pack_quantized_matrix.KN,
):
    kernel(_func.name().partition("::")[2])(Refused(_func))


class OfAnotherKind(Refused):
    """The kernel of an overload that makes a tensor of a kind the device has not, or computes with such."""

    def __init__(self, func: OpOverload, kind: str) -> None:
        super().__init__(func)
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise no_such_tensors(self.kind, self.func.name().removesuffix(".default"))


# What arrives at the device's key though the tensor that it is about would have another: `device.unsupported_tensors`.
for _kind, _functions in {
    "strided nested": (
        aten._nested_tensor_from_tensor_list.default,
        aten._nested_from_padded.default,
        aten._nested_from_padded_and_nested_example.default,
        aten._nested_view_from_buffer.default,
        aten._nested_view_from_buffer_copy.default,
    ),
    "sparse compressed": (
        aten._sparse_compressed_tensor_unsafe.default,
        aten._sparse_csr_tensor_unsafe.default,
        aten._sparse_csc_tensor_unsafe.default,
        aten._sparse_bsr_tensor_unsafe.default,
        aten._sparse_bsc_tensor_unsafe.default,
        aten.sparse_compressed_tensor.comp_plain_value,
        aten.sparse_compressed_tensor.comp_plain_value_size,
    ),
    "torch.sparse_coo": (
        aten.hspmm.default,
        aten._sparse_softmax.default,
        aten._sparse_log_softmax.default,
        aten.sparse_resize_.default,
    ),
}.items():
    for _func in _functions:
        kernel(_func.name().partition("::")[2])(OfAnotherKind(_func, _kind))


@kernel("_saturate_weight_to_fp16")
def saturate_to_half_precision(weight: torch.Tensor) -> torch.Tensor:
    """In place, though the schema does not say so."""
    largest = torch.finfo(torch.float16).max
    return weight.clamp_(-largest, largest)


@kernel("from_file")
def from_file(filename: str, shared: bool | None = None, size: int | None = 0, **options: Any) -> torch.Tensor:
    if shared:
        raise NotImplementedError(
            "torch.from_file(shared=True) writes to its file; a tensor of the tpu device can't. Use shared=False."
        )
    dtype = options.get("dtype") or torch.get_default_dtype()
    return from_host(torch.from_file(filename, shared, size, dtype=dtype))


@kernel("_lazy_clone")
def lazy_clone(t: torch.Tensor) -> torch.Tensor:
    """Every clone here is lazy: values never change, so two storages may hold the same."""
    return HANDWRITTEN["clone"](t)
