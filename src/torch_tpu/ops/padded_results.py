"""Operators whose result size depends on data, as programs of fixed size: padded results and how much of them counts.

They are private operators of the namespace `tpu`; the kernels in `eager.kernels.dynamic_size` cut their results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops import reduction
from torch_tpu.ops.core.registry import Check, lower
from torch_tpu.ops.indexing import added, read, region, replaced
from torch_tpu.ops.reduction import index_dtype
from torch_tpu.ops.scan import cumulative_sum
from torch_tpu.ops.search import binary_search, count_in_bins
from torch_tpu.ops.sorting import ordering_key, run_starts, sorted_integers, sorting_order

# From this many integers on, those that span few values are counted rather than sorted on XLA:CPU.
_COUNTED_FROM = 2**12
_PLAIN_INTEGERS = (torch.int32, torch.int64)


def true_positions(mask: Array) -> tuple[Array, Array]:
    """Where a one-dimensional mask is true, in ascending order, then its size as padding; and how many that are."""
    size, dtype = mask.shape[0], index_dtype(mask.shape[0])
    through = cumulative_sum(hlo.convert(mask, dtype), 0)
    target = hlo.select(mask, through - 1, size)
    positions = replaced(hlo.full((size,), size, dtype), region((size,), {0: target}), hlo.iota((size,), 0, dtype))
    return positions, hlo.reshape(hlo.slice_in_dim(through, size - 1, size), ())


def _unravelled(positions: Array, shape: Sequence[int]) -> list[Array]:
    """For each dimension of `shape`, the coordinates of row-major positions."""
    coordinates = []
    for d, size in enumerate(shape):
        stride = math.prod(shape[d + 1 :])
        coordinates.append(hlo.remainder(positions, size * stride) if d else positions)
        coordinates[-1] = hlo.divide(coordinates[-1], stride)
    return coordinates


# --- where a tensor is true --------------------------------------------------------------------------------------


@lower("tpu::nonzero_padded")
def nonzero_padded(x: Array) -> tuple[Array, Array]:
    """The coordinates of `nonzero` column after column without a gap, as PyTorch lays them out in memory."""
    positions, count = true_positions(hlo.reshape(x.ne(0), [-1]))
    packed = hlo.zeros((x.ndim * x.size,), torch.int64)
    for d, column in enumerate(_unravelled(positions, x.shape)):
        # What is padding here is overwritten by the next column.
        packed = hlo.dynamic_update_slice(packed, hlo.convert(column, torch.int64), [count * d])
    return packed, count


@lower("nonzero_static")
def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    if not x.ndim or not size or not x.size:
        return hlo.full((size, x.ndim), fill_value, torch.int64)
    positions, count = true_positions(hlo.reshape(x.ne(0), [-1]))
    positions = hlo.pad(positions, 0, [0], [size - x.size])
    found = hlo.iota((size, 1), 0, count.dtype) < count
    return hlo.select(found, hlo.convert(hlo.stack(_unravelled(positions, x.shape), 1), torch.int64), fill_value)


@lower("tpu::masked_select_padded")
def masked_select_padded(x: Array, mask: Array) -> tuple[Array, Array]:
    shape = hlo.broadcast_shapes(x.shape, mask.shape)
    x, mask = (hlo.reshape(hlo.broadcast_to(a, shape), [-1]) for a in (x, mask))
    positions, count = true_positions(mask)
    return read(x, region(x.shape, {0: positions})), count


# --- unique ------------------------------------------------------------------------------------------------------


def _groups(starts: Array, order: Array | None) -> tuple[Array, Array, Array, Array]:
    """Of runs that begin where `starts` is true: first positions, run of each element, lengths, number of runs.

    Args:
        order: where each element of the sequence of runs stands in the original one.
    """
    first, number = true_positions(starts)
    size = starts.shape[0]
    run = cumulative_sum(hlo.convert(starts, first.dtype), 0) - 1
    if order is not None:
        run = replaced(hlo.full_like(run, 0), region((size,), {0: order}), run)
    following = hlo.pad(hlo.slice_in_dim(first, 1, size), size, [0], [1])
    return first, hlo.convert(run, torch.int64), hlo.convert(following - first, torch.int64), number


@lower("tpu::unique_padded")
def unique_padded(x: Array, sort: bool, inverse: bool, counts: bool) -> tuple[Array, Array, Array, Array]:
    """Distinct elements, or those that differ from the one before if not `sort`. Every NaN is one of its own."""
    shape, x = x.shape, hlo.reshape(x, [-1])
    if sort and x.size >= _COUNTED_FROM and x.dtype in _PLAIN_INTEGERS and module.target().platform == "cpu":
        least, greatest = reduction.least_and_greatest(x)
        narrow = (greatest - least >= 0) & (greatest - least < x.size)
        results = [(x.shape, x.dtype), *[(x.shape, torch.int64)] * 2, ((), index_dtype(x.size))]
        values, run, length, number = structured.conditional(
            narrow, lambda: _unique_by_counting(x, least), lambda: _unique_by_order(x, sort, inverse), results
        )
    else:
        values, run, length, number = _unique_by_order(x, sort, inverse)
    nothing = hlo.zeros((0,), torch.int64)
    return values, hlo.reshape(run, shape) if inverse else nothing, length if counts else nothing, number


def _unique_by_order(x: Array, sort: bool, inverse: bool) -> tuple[Array, Array, Array, Array]:
    order = None
    if sort and not inverse and x.dtype in _PLAIN_INTEGERS:
        x = sorted_integers(x, 0)
    elif sort:
        order = sorting_order(x, 0)
        x = read(x, region(x.shape, {0: order}))
    first, run, length, number = _groups(run_starts(x, 0), order)
    return read(x, region(x.shape, {0: first})), run, length, number


def _unique_by_counting(x: Array, least: Array) -> tuple[Array, Array, Array, Array]:
    """The same for integers that span fewer values than there are elements; XLA:CPU counts faster than it sorts."""
    at = region(x.shape, {0: hlo.convert(x - least, index_dtype(x.size))})
    count = added(hlo.zeros(x.shape, torch.int32), at, hlo.full(x.shape, 1, torch.int32))
    positions, number = true_positions(count > 0)
    rank = cumulative_sum(hlo.convert(count > 0, torch.int32), 0) - 1
    values = hlo.convert(positions, x.dtype) + least
    run = hlo.convert(read(rank, at), torch.int64)
    return values, run, hlo.convert(read(count, region(x.shape, {0: positions})), torch.int64), number


@lower("tpu::unique_slices_padded")
def unique_slices_padded(x: Array, dim: int, sort: bool) -> tuple[Array, Array, Array, Array]:
    """The same for the slices of `dim`, which becomes the first dimension of the result."""
    x = hlo.transpose(x, [dim, *(d for d in range(x.ndim) if d != dim)])
    rows = hlo.reshape(x, (x.shape[0], x.size // x.shape[0]))
    order = _order_of_rows(rows) if sort else None
    if order is not None:
        rows = read(rows, region(rows.shape, {0: order}))
    first, run, length, number = _groups(structured.reduce_or(run_starts(rows, 0), [1]), order)
    return hlo.reshape(read(rows, region(rows.shape, {0: first})), x.shape), run, length, number


def _order_of_rows(rows: Array) -> Array:
    """Lexicographic order, by a stable sort for each column from the last to the first."""
    count, width = rows.shape
    keys = hlo.transpose(ordering_key(rows), [1, 0])
    zero = hlo.constant(0, torch.int32)

    def by_column(i: Array, order: Array) -> Array:
        key = hlo.reshape(hlo.dynamic_slice(keys, [width - 1 - i, zero], [1, count]), (count,))
        step = sorting_order(read(key, region((count,), {0: order})), 0)
        return read(order, region((count,), {0: step}))

    return structured.fori_loop(width, by_column, [hlo.iota((count,), 0, index_dtype(count))])[0]


# --- sizes that are values ---------------------------------------------------------------------------------------


@lower("tpu::least_and_greatest")
def least_and_greatest(x: Array) -> Array:
    x = hlo.convert(x, torch.int64)
    return hlo.stack(reduction.least_and_greatest(x), 0)


@lower("tpu::least_and_sum")
def least_and_sum(x: Array) -> Array:
    x = hlo.convert(x, torch.int64)
    return hlo.stack([structured.reduce_min(x, [0]), structured.reduce_sum(x, [0])], 0)


@lower("tpu::bincount_sized")
def bincount_sized(x: Array, weights: Array | None, size: int) -> Array:
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return count_in_bins(size, hlo.convert(x, torch.int64), weights, dtype)


@lower("tpu::repeat_interleave_sized")
def repeat_interleave_sized(repeats: Array, size: int, exact: bool, *, check: Check) -> Array:
    """Index i repeats[i] times, up to `size` results; if `exact` there must be that many."""
    ends = cumulative_sum(hlo.convert(repeats, torch.int64), 0)
    if exact:
        check(structured.reduce_min(repeats, [0]) >= 0, "repeats can not be negative", RuntimeError)
        total = hlo.reshape(hlo.slice_in_dim(ends, ends.size - 1, ends.size), ())
        check(total.eq(size), "allocated size does not match required size", RuntimeError)
    found = binary_search(ends, hlo.iota((size,), 0, torch.int64), lambda end, i: end <= i)
    return hlo.convert(found, repeats.dtype)
