"""Kernels that only make memory or describe it: empty tensors, views, `set_`, `resize_`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu import hooks
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.hlo import strided, types
from torch_tpu.hooks import check_device
from torch_tpu.ops.tracing import uninitialised
from torch_tpu.tensor import storage as st
from torch_tpu.tensor.errors import check_fits, no_such_tensors
from torch_tpu.tensor.storage import empty_tensor, new_storage, set_geometry, value_of

_HOST_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ELEMENTS_OF_ANY_DEVICE = 2**30


def _checked(device: torch.device | None, layout: torch.layout | None, dtype: torch.dtype | None) -> torch.dtype:
    if hooks.forked is not None:
        hooks.forked()
    check_device(device)
    if layout not in (None, torch.strided):
        raise no_such_tensors(layout)
    dtype = dtype or torch.get_default_dtype()
    types.numpy_dtype(dtype)
    return dtype


@kernel("empty.memory_format")
def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    dtype = _checked(device, layout, dtype)
    if any(s < 0 for s in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return _empty(size, strided.contiguous_strides(size), dtype)
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _empty(size, like.stride(), dtype)


def _empty(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # Nothing is allocated before it is written or read; what can never be is refused at once.
    if math.prod(size) > _ELEMENTS_OF_ANY_DEVICE:
        check_fits(math.prod(size) * dtype.itemsize)
    return _filled(empty_tensor(size, strides, dtype))


def _filled(t: torch.Tensor) -> torch.Tensor:
    """Fresh memory as PyTorch's settings say that it is to be."""
    if uninitialised.is_filled() and t.untyped_storage().nbytes():
        elements = t.untyped_storage().nbytes() // t.element_size()
        st.view(t.untyped_storage(), t.dtype, 0, (elements,), (1,)).fill_(uninitialised.filler(t.dtype))
    return t


@kernel("empty_strided")
def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    dtype = _checked(device, layout, dtype)
    if min((*size, *stride, 0)) < 0:
        torch.empty_strided(size, stride, dtype=dtype, device="cpu")  # raises
    return _empty(tuple(size), tuple(stride), dtype)


def host_metadata_kernel(func: Any) -> Callable[..., torch.Tensor]:
    """A view operator run by PyTorch's own kernel, which touches nothing but sizes and strides."""
    redispatch = func.redispatch

    def run(*args: Any, **kwargs: Any) -> Any:
        return redispatch(_HOST_KERNELS, *args, **kwargs)

    return run


for _name in ("as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"):
    kernel(_name)(host_metadata_kernel(getattr(torch.ops.aten, _name).default))


@kernel("set_.source_Storage_storage_offset")
def set_storage_offset(
    t: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    return set_geometry(t, source, offset, tuple(size), tuple(stride) or strided.contiguous_strides(size))


@kernel("set_.source_Storage")
def set_storage(t: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    return set_geometry(t, source, 0, (source.nbytes() // t.element_size(),), (1,))


@kernel("set_.source_Tensor")
def set_tensor(t: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return set_geometry(t, source.untyped_storage(), int(source.storage_offset()), source.shape, source.stride())


@kernel("set_")
def set_nothing(t: torch.Tensor) -> torch.Tensor:
    return set_geometry(t, new_storage(0, st.uninitialised(0, t.dtype)), 0, (0,), (1,))


@kernel("as_strided_")
def as_strided_(t: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> torch.Tensor:
    if min(stride, default=0) < 0:
        raise RuntimeError(f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}")
    return set_geometry(t, t.untyped_storage(), int(t.storage_offset()) if offset is None else offset, size, stride)


@kernel("is_set_to")
def is_set_to(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


@kernel("resize_")
def resize_(t: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Keeps the storage where it is large enough; else the tensor gets a larger one that begins with the old elements.

    Other tensors over the old storage keep it: the size of a device storage can't change in place from Python.
    """
    if t.shape == torch.Size(size) and memory_format is None:
        return t
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        strides: tuple[int, ...] = strided.contiguous_strides(size)
    else:
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
    storage, offset = t.untyped_storage(), int(t.storage_offset())
    needed = strided.storage_elements(size, strides, offset) * t.element_size()
    if needed > storage.nbytes():
        check_fits(needed)
        old = value_of(storage)
        larger = new_storage(needed, st.uninitialised(needed, t.dtype))
        count = storage.nbytes() // t.element_size()
        if old.array is not None and storage.nbytes():
            st.view(larger, t.dtype, 0, (count,), (1,)).copy_(st.view(storage, t.dtype, 0, (count,), (1,)))
        if uninitialised.is_filled():
            rest = needed // t.element_size() - count
            st.view(larger, t.dtype, count, (rest,), (1,)).fill_(uninitialised.filler(t.dtype))
        storage = larger
    return set_geometry(t, storage, offset, tuple(size), strides)


@kernel("record_stream")
def record_stream(t: torch.Tensor, stream: Any) -> None:
    """Nothing to do: a buffer lives until the programs that read it have run."""
