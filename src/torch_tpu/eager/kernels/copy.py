"""Copies: within the device, from and to the host, and reading one number."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.hlo.strided import is_dense
from torch_tpu.hooks import check_device
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.tensor.errors import device_mismatch, no_such_tensors
from torch_tpu.tensor.storage import Content, Value, geometry, new_tensor, value_of
from torch_tpu.tensor.transfer import from_host, host_view, upload

aten = torch.ops.aten


def owns_storage(t: torch.Tensor) -> bool:
    """Whether the tensor shows its whole storage, each element once: writing it replaces the storage's value."""
    return t.numel() * t.element_size() == t.untyped_storage().nbytes() and is_dense(t.shape, t.stride())


def _whole_value(t: torch.Tensor) -> Content | None:
    """The value of a tensor that is exactly what its storage holds."""
    if t.device.type == "cpu":
        raise device_mismatch(t)
    value = value_of(t.untyped_storage())
    g = value.geometry
    if t.dtype is g.dtype and t.shape == g.sizes and t.stride() == g.strides and not t.storage_offset():
        return value
    return None


def _real(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The real part of what is to become real, with PyTorch's warning, which would name a line of this file."""
    if not t.is_complex() or dtype.is_complex or dtype is torch.bool:
        return t
    warn("Casting complex values to real discards the imaginary part")
    return t.real


def write_from_host(dst: torch.Tensor, host: torch.Tensor) -> None:
    """Writes a host tensor (broadcast and converted) into a device tensor."""
    host = _real(host.detach(), dst.dtype).to(dst.dtype)
    if host.shape != dst.shape:
        torch.empty(dst.shape, device="meta").copy_(host.to("meta"))  # raises what the CPU does
        host = host.expand(dst.shape)
    if owns_storage(dst):
        value = Value(upload(host.contiguous()), geometry(dst.shape, dst.stride(), dst.dtype))
        dst.untyped_storage().value = value  # type: ignore[attr-defined]
    else:
        as_program(aten.copy_.default)(dst, from_host(host))


@kernel("copy_")
def copy_(dst: torch.Tensor, src: torch.Tensor | complex, non_blocking: bool = False) -> torch.Tensor:
    if dst is src:
        return dst
    if not isinstance(src, torch.Tensor):
        src = torch.tensor(src)
    if dst.is_conj():
        copy_(dst.conj(), src.conj())
        return dst
    if dst.is_neg():
        copy_(torch._neg_view(dst), torch._neg_view(src))
        return dst
    on_device = src.device.type == dst.device.type
    if src.is_conj() or src.is_neg():
        src = (src if src.device.type == "cpu" else _physical(src)).resolve_conj().resolve_neg()
    if on_device:
        value = _whole_value(src)
        same = src.shape == dst.shape and src.stride() == dst.stride() and src.dtype is dst.dtype
        if value is not None and same and owns_storage(dst):
            dst.untyped_storage().value = value  # type: ignore[attr-defined]
            return dst
        as_program(aten.copy_.default)(dst, _real(src, dst.dtype))
    elif dst.device.type == "tpu":
        write_from_host(dst, src)
    else:
        dst.copy_(_real(host_view(src), dst.dtype))
    return dst


def _physical(t: torch.Tensor) -> torch.Tensor:
    """A copy of a device tensor without its conjugate and negative bits."""
    if t.is_conj():
        t = torch.ops.aten.conj_physical.default(t.conj())
    if t.is_neg():
        t = torch.ops.aten.neg.default(torch._neg_view(t))
    return t


@kernel("_copy_from")
def _copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, src)


@kernel("_copy_from_and_resize")
def _copy_from_and_resize(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    if dst.shape != src.shape:
        dst.resize_(src.shape)
    return copy_(dst, src)


@kernel("clone")
def clone(t: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Free where the result's layout is the source's: both storages hold the same immutable value."""
    if t.is_conj() or t.is_neg():
        t = _physical(t)
    value = _whole_value(t)
    if value is not None and _keeps_layout(t, memory_format):
        return new_tensor(value)
    return as_program(aten.clone.default)(t, memory_format=memory_format)


def _keeps_layout(t: torch.Tensor, memory_format: torch.memory_format | None) -> bool:
    return memory_format in (None, torch.preserve_format) or t.is_contiguous(memory_format=memory_format)


@kernel("_to_copy")
def _to_copy(
    t: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Never asks for pinned memory, which PyTorch's own kernel does for non-blocking copies to the host."""
    dtype = dtype or t.dtype
    if device is not None and device.type == "tpu":
        check_device(device)
    if layout not in (None, torch.strided):
        raise no_such_tensors(layout)
    if device is not None and device.type != "tpu":
        if memory_format in (None, torch.preserve_format):
            if is_dense(t.shape, t.stride()):
                # Called like this, what PyTorch warns of names the user's line.
                result = aten.empty_strided.default(t.shape, t.stride(), dtype=dtype, device=device)
            else:
                result = torch.empty_like(t, dtype=dtype, device=device)
        else:
            result = torch.empty(t.shape, dtype=dtype, device=device, memory_format=memory_format)
        return result.copy_(t)
    if t.device.type == "cpu":
        if memory_format not in (None, torch.preserve_format):
            t = t.contiguous(memory_format=memory_format)
        return from_host(_real(t.detach(), dtype).to(dtype).resolve_conj().resolve_neg())
    if t.is_conj() or t.is_neg():
        t = _physical(t)
    if dtype is t.dtype:
        return clone(t, memory_format=memory_format)
    return as_program(aten._to_copy.default)(_real(t, dtype), dtype=dtype, memory_format=memory_format)


@kernel("_local_scalar_dense")
def _local_scalar_dense(t: torch.Tensor) -> Any:
    return host_view(t, "item").item()


@kernel("equal")
def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        raise device_mismatch(a if a.device.type == "cpu" else b)
    with metrics.waiting("equal"):
        return a.shape == b.shape and bool(torch.eq(a, b).all().item())
