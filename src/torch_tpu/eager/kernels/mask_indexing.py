"""`x[…]` with masks among the indices: masks become positions before the program, whose shapes they decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.dispatch.out_form import raise_as_cpu
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.tensor.errors import device_mismatch
from torch_tpu.tensor.transfer import host_view

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int32, torch.int64)
_Indices = Sequence[torch.Tensor | None]


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in _MASKS


def _positions(x: torch.Tensor, indices: _Indices) -> list[torch.Tensor | None]:
    """The indices on the tensor's device, each mask replaced by the positions of its true elements."""
    if x.device.type == "cpu":
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    result: list[torch.Tensor | None] = []
    for index in indices:
        if index is None:
            result.append(None)
        elif _is_mask(index):
            _check_mask(x, len(result), index, len([i for i in result if i is not None]))
            result.extend(p.to(x.device) for p in index.nonzero().unbind(1))
        elif index.dtype not in _INTEGERS:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        else:
            result.append(index if index.device == x.device else index.to(x.device))
    if len(result) > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()} (got {len(result)})")
    shapes = [i.shape for i in result if i is not None]
    if any(shape != shapes[0] for shape in shapes):
        try:
            torch.broadcast_shapes(*shapes)
        except RuntimeError:
            raise IndexError(
                "shape mismatch: indexing tensors could not be broadcast together with shapes "
                + ", ".join(str(list(shape)) for shape in shapes)
            ) from None
    return result


def _check_mask(x: torch.Tensor, dim: int, mask: torch.Tensor, position: int) -> None:
    if mask.dtype is torch.uint8:
        warn("indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.")
    for d, size in enumerate(mask.shape):
        if dim + d >= x.dim() or x.shape[dim + d] != size:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {d} does not match the shape of the indexed tensor "
                f"{list(x.shape)} at index {dim + d}"
            )


@kernel("index.Tensor")
def index(x: torch.Tensor, indices: _Indices) -> torch.Tensor:
    return as_program(aten.index.Tensor)(x, _positions(x, indices))


def _single_mask(x: torch.Tensor, indices: _Indices, values: torch.Tensor) -> torch.Tensor | None:
    """The mask to fill by, broadcast to `x`, where one value goes to the true elements of one mask.

    That needs no positions, so nothing waits for the device.
    """
    given = [i for i in indices if i is not None]
    if len(given) != 1 or not _is_mask(given[0]) or values.numel() != 1 or values.dtype is not x.dtype:
        return None
    mask = given[0]
    if mask.dtype is torch.uint8:
        raise RuntimeError("masked_fill_ only supports boolean masks, but got mask with dtype unsigned char")
    before = next(d for d, i in enumerate(indices) if i is not None)
    _check_mask(x, before, mask, 0)
    return mask.to(x.device, torch.bool).reshape(mask.shape + (1,) * (x.dim() - before - mask.dim()))


def _put(name: str, fill: Any) -> Callable[..., torch.Tensor]:
    func = getattr(aten, name).default

    @kernel(name)
    def index_put(
        x: torch.Tensor, indices: _Indices, values: torch.Tensor, accumulate: bool = False, *unsafe: bool
    ) -> torch.Tensor:
        mask = None if accumulate else _single_mask(x, indices, values)
        if mask is not None:
            # The CPU reads the number before it writes.
            value = values.reshape(())
            return fill(x, mask, value.clone() if value.untyped_storage() is x.untyped_storage() else value)
        if values.device != x.device and values.dim():
            raise device_mismatch(values)
        positions = _positions(x, indices)
        if name.endswith("_") and _shared(x):
            return _put_shared(x, positions, values, accumulate, *unsafe)
        return as_program(func)(x, positions, values, accumulate, *unsafe)

    return index_put


def _shared(x: torch.Tensor) -> list[int]:
    """Dimensions along which all elements are the same memory."""
    return [d for d, stride in enumerate(x.stride()) if stride == 0 and x.shape[d] > 1] if x.numel() else []


def _put_shared(
    x: torch.Tensor, positions: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool, *unsafe: bool
) -> torch.Tensor:
    """Writes to an expanded tensor as the CPU does: one element after the other."""
    target = _shown_once(x, positions)
    rest = _shared(target)
    if accumulate or not rest:
        as_program(aten._index_put_impl_.default)(target, positions, values, accumulate, *unsafe)
        return x
    written = _looked_at(as_program(aten.index_put.default)(target, positions, values))
    for d in rest:
        written, target = written.narrow(d, x.shape[d] - 1, 1), target.narrow(d, 0, 1)
    target.copy_(written)
    return x


def _looked_at(t: torch.Tensor) -> torch.Tensor:
    """Waits for a result, so that an index out of bounds is found before anything is written."""
    host_view(t, "index of an expanded tensor")
    return t


def _shown_once(x: torch.Tensor, positions: list[torch.Tensor | None]) -> torch.Tensor:
    """An expanded tensor with one entry along dimensions that are indexed; indices there become 0.

    So elements are written in the order of the indices, as on the CPU.
    """
    for d in _shared(x):
        index = positions[d] if d < len(positions) else None
        if index is None or not index.numel():
            continue
        # Reading zeros there also says whether the indices are in bounds.
        zeros = torch.zeros(1, dtype=torch.int64, device=x.device).expand(x.shape[d])
        positions[d] = _looked_at(as_program(aten.index.Tensor)(zeros, [index]))
        x = x.narrow(d, 0, 1)
    return x


index_put = _put("index_put", aten.masked_fill.Tensor)
index_put_ = _put("index_put_", aten.masked_fill_.Tensor)
index_put_impl_ = _put("_index_put_impl_", aten.masked_fill_.Tensor)


@kernel("select_scatter")
def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """The index is data, which no program looks at."""
    if not -x.dim() <= dim < x.dim() or not -x.shape[dim] <= index < x.shape[dim]:
        raise_as_cpu(aten.select_scatter.default, (x, source, dim, index), {})
    result: torch.Tensor = as_program(aten.select_scatter.default)(x, source, dim, index)
    return result
