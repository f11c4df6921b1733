"""Reading and writing elements that index tensors address: the regions they mean, index_select, gather, take, put.

StableHLO's gather clamps and its scatter drops indices that are out of range, so the bounds are stated with `check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.structured import Combine
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.reduction import least_and_greatest

OUT_OF_BOUNDS = "index {{}} is out of bounds for dimension {dim} with size {size}"
OUT_OF_RANGE = "index out of range in self"


# --- bounds ------------------------------------------------------------------------------------------------------


def check_bounds(
    check: Check,
    index: Array,
    size: int,
    message: str,
    error: type[Exception] = IndexError,
    *,
    low: int = 0,
) -> None:
    """States that every index lies in [low, size); `{}` in the message stands for one that doesn't."""
    if not index.size:
        return
    index = wide_index(index)
    least, greatest = least_and_greatest(index)
    check((least >= low) & (greatest < size), message, error, hlo.select(least < low, least, greatest))


def check_rows(check: Check, index: Array, x: Array, dim: int = 0) -> None:
    """States that every index is one of a slice of `x`; where the CPU copies whole blocks it says it otherwise."""
    size = x.shape[dim]
    if dim != 1 and (x.size or not size):
        check_bounds(check, index, size, OUT_OF_RANGE)
    else:
        message = f"INDICES element is out of DATA bounds, id={{}} axis_dim={size}"
        check_bounds(check, index, size, message, RuntimeError)


def wide_index(index: Array) -> Array:
    """An index in a dtype that can hold any size."""
    return index if index.dtype in (torch.int32, torch.int64) else hlo.convert(index, torch.int64)


def wrapped(index: Array, size: int) -> Array:
    """Negative indices counted from the end."""
    index = wide_index(index)
    return hlo.select(index < 0, index + size, index)


# --- regions -----------------------------------------------------------------------------------------------------


class IndexedElements(NamedTuple):
    """The elements of a tensor that index tensors address, in the terms of StableHLO's gather and scatter.

    Attributes:
        coordinates: of shape [*index shape, len(dims)]: where in `dims` each slice is.
        dims: the indexed dimensions of the tensor.
        window_dims: the dimensions of the region that run over the tensor's other dimensions.
        shape: of the region.
    """

    coordinates: Array
    dims: list[int]
    window_dims: list[int]
    shape: tuple[int, ...]


def region(shape: Sequence[int], indices: Mapping[int, Array], at: int = 0) -> IndexedElements:
    """The region of a tensor of `shape` addressed by non-negative indices, which broadcast together.

    Args:
        indices: for each indexed dimension, in ascending order.
        at: how many of the other dimensions stand before those of the indices.
    """
    dims = list(indices)
    block = hlo.broadcast_shapes(*(i.shape for i in indices.values()))
    others = [size for d, size in enumerate(shape) if d not in indices]
    dtype = torch.int32 if max(shape, default=0) < 2**31 else torch.int64
    coordinates = hlo.stack([hlo.broadcast_to(hlo.convert(i, dtype), block) for i in indices.values()], len(block))
    window_dims = [d if d < at else d + len(block) for d in range(len(others))]
    return IndexedElements(coordinates, dims, window_dims, (*others[:at], *block, *others[at:]))


def elements(shape: Sequence[int], dim: int, index: Array) -> IndexedElements:
    """One element for each entry of `index`: at its own position, but for `dim`, where the entry says."""
    return region(shape, {d: index if d == dim else hlo.iota(index.shape, d) for d in range(len(shape))})


def read(x: Array, where: IndexedElements) -> Array:
    """The elements of a region."""
    if 0 in where.shape or not x.size:
        return hlo.zeros(where.shape, x.dtype)
    return structured.gather(
        x,
        where.coordinates,
        offset_dims=where.window_dims,
        collapsed_slice_dims=where.dims,
        start_index_map=where.dims,
        slice_sizes=[1 if d in where.dims else size for d, size in enumerate(x.shape)],
    )


def combined(x: Array, where: IndexedElements, updates: Array, combine: Combine) -> Array:
    """`x` with `combine(old, update)` in a region, one update after the other; those out of bounds are left out."""
    if 0 in where.shape:
        return x
    return structured.scatter(
        [x],
        where.coordinates,
        [hlo.broadcast_to(hlo.convert(updates, x.dtype), where.shape)],
        combine,
        update_window_dims=where.window_dims,
        inserted_window_dims=where.dims,
        scatter_dims_to_operand_dims=where.dims,
    )[0]


def replaced(x: Array, where: IndexedElements, updates: Array) -> Array:
    """`x` with new values in a region; of several for one element the last counts."""
    return combined(x, where, updates, lambda old, new: new)


def added(x: Array, where: IndexedElements, updates: Array) -> Array:
    """`x` with the updates added to a region, in the dtype PyTorch accumulates in."""
    if x.dtype is torch.bool:
        return combined(x, where, updates, hlo.or_)
    return combined(hlo.convert(x, compute_dtype(x.dtype)), where, updates, hlo.add)


# --- along one dimension -----------------------------------------------------------------------------------------


def at_least_1d(x: Array) -> Array:
    return x if x.ndim else x.reshape(1)


@lower("index_select")
def index_select(x: Array, dim: int, index: Array, *, out: Spec, check: Check) -> Array:
    x, index = at_least_1d(x), at_least_1d(index)
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if index.ndim > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.size and not x.shape[dim]:
        raise RuntimeError("index_select(): self indexing axis dim should be positive")
    dim %= x.ndim
    check_rows(check, index, x, dim)
    return hlo.reshape(read(x, region(x.shape, {dim: index}, dim)), out.shape)


@lower("gather")
def gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False, out: Spec, check: Check) -> Array:
    x, index = at_least_1d(x), at_least_1d(index)
    dim %= x.ndim
    check_bounds(check, index, x.shape[dim], OUT_OF_BOUNDS.format(dim=dim, size=x.shape[dim]), RuntimeError)
    return hlo.reshape(read(x, elements(x.shape, dim, index)), out.shape)


def _flat(x: Array, index: Array, check: Check) -> IndexedElements:
    message = f"out of range: tried to access index {{}} on a tensor of {x.size} elements."
    check_bounds(check, index, x.size, message, low=-x.size)
    return region((x.size,), {0: wrapped(index, x.size)})


@lower("take")
def take(x: Array, index: Array, *, check: Check) -> Array:
    return read(x.reshape(-1), _flat(x, index, check))


@lower("put")
def put(x: Array, index: Array, source: Array, accumulate: bool = False, *, check: Check) -> Array:
    if source.size != index.size:
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.size}, index.numel() = {index.size}"
        )
    if source.dtype is not x.dtype:
        raise RuntimeError(
            f"put_(): self and source expected to have the same dtype, but got {x.dtype} and {source.dtype}"
        )
    updates = hlo.reshape(source, index.shape)
    return hlo.reshape((added if accumulate else replaced)(x.reshape(-1), _flat(x, index, check), updates), x.shape)
