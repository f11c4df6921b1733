"""Reductions over segments of a dimension, whose lengths are data: `segment_reduce` and its derivative."""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import IndexedElements, combined, read, region
from torch_tpu.ops.scan import cumulative_sum
from torch_tpu.ops.search import binary_search

_START = {"sum": 0, "mean": 0, "prod": 1, "max": -math.inf, "min": math.inf}
_COMBINE = {"sum": hlo.add, "mean": hlo.add, "prod": hlo.multiply, "max": hlo.maximum, "min": hlo.minimum}


def _lengths(lengths: Array | None, offsets: Array | None) -> Array:
    """Of the segments; given by offsets, the differences of these."""
    if lengths is not None:
        return lengths
    if offsets is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    last = offsets.shape[-1]
    return hlo.slice_in_dim(offsets, 1, last, dim=-1) - hlo.slice_in_dim(offsets, 0, last - 1, dim=-1)


def _segment_of(lengths: Array, size: int) -> Array:
    """For each position of the dimension, the segment it is in; behind the last one, their number."""
    axis = lengths.ndim - 1
    ends = cumulative_sum(hlo.convert(lengths, torch.int64), axis)
    positions = hlo.iota((*lengths.shape[:-1], size), axis, torch.int64)
    return binary_search(ends, positions, lambda end, i: end <= i)


def _region(shape: tuple[int, ...], segment: Array) -> IndexedElements:
    """Of a tensor with a row per segment, the row of each position."""
    axis = segment.ndim - 1
    return region(shape, {d: segment if d == axis else hlo.iota(segment.shape, d) for d in range(axis + 1)})


def _beside(x: Array, like: Array) -> Array:
    """A value per segment, with dimensions of size 1 for those behind the segments."""
    return hlo.reshape(x, (*x.shape, *[1] * (like.ndim - x.ndim)))


@lower("segment_reduce")
def segment_reduce(
    data: Array,
    reduce: str,
    *,
    lengths: Array | None,
    indices: Array | None,
    offsets: Array | None,
    axis: int,
    unsafe: bool,
    initial: ArrayLike | None,
    out: Spec,
    check: Check,
) -> Array:
    counts = _lengths(lengths, offsets)
    if counts.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"segment_reduce() takes lengths and offsets of int32 or int64, not of {counts.dtype}")
    size = data.shape[counts.ndim - 1]
    if not unsafe:
        total = structured.reduce_sum(hlo.convert(counts, torch.int64), [counts.ndim - 1])
        complete = structured.reduce_and(total.eq(size), range(total.ndim))
        positive = structured.reduce_and(counts >= 0, range(counts.ndim))
        what = "lengths" if lengths is not None else "offsets"
        check(positive, f"{what} contains negative value!", RuntimeError)
        message = "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1)"
        check(complete, f"{message} when !unsafe.", RuntimeError)
    wide = hlo.convert(data, compute_dtype(data.dtype))
    start = _START[reduce] if initial is None else hlo.as_array(initial, wide.dtype)
    result = hlo.broadcast_to(hlo.as_array(start, wide.dtype), out.shape)
    result = combined(result, _region(out.shape, _segment_of(counts, size)), wide, _COMBINE[reduce])
    if reduce == "mean":
        count = _beside(hlo.convert(counts, wide.dtype), result)
        nothing = math.nan if initial is None else start
        result = hlo.select(count > 0, result / count, nothing)
    return result


@lower("_segment_reduce_backward")
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None,
    offsets: Array | None,
    axis: int,
    initial: ArrayLike | None,
) -> Array:
    """Positions outside of all segments get 0."""
    counts = _lengths(lengths, offsets)
    size, shape = data.shape[counts.ndim - 1], grad.shape
    segment = _segment_of(counts, size)
    where = _region(shape, segment)
    dtype = compute_dtype(data.dtype)
    data, grad, output = (hlo.convert(x, dtype) for x in (data, grad, output))

    def per_segment(x: Array, combine: structured.Combine = hlo.add, start: float = 0) -> Array:
        """Each segment's reduction of a value per position, seen from each of its positions."""
        return read(combined(hlo.full(shape, start, x.dtype), where, x, combine), where)

    mine = read(grad, where)
    match reduce:
        case "sum":
            result = mine
        case "mean":
            result = mine / read(hlo.broadcast_to(_beside(hlo.convert(counts, dtype), grad), shape), where)
        case "max" | "min":
            reached = hlo.is_nan(data) | data.eq(read(output, where))
            ties = per_segment(hlo.convert(reached, dtype))
            # The CPU divides positive gradients among ties, and gives negative ones to each in full.
            result = hlo.select(reached, hlo.select((mine > 0) & (ties > 1), mine / ties, mine), 0)
        case _:
            is_zero, is_nan = data.eq(0), hlo.is_nan(data)
            zeros, nans = (per_segment(hlo.convert(x, dtype)) for x in (is_zero, is_nan))
            others = per_segment(hlo.select(is_zero | is_nan, 1, data), hlo.multiply, 1)
            if initial is not None:
                others = others * hlo.as_array(initial, dtype)
            zeros, nans = zeros - hlo.convert(is_zero, dtype), nans - hlo.convert(is_nan, dtype)
            others = hlo.select(nans > 0, math.nan, hlo.select(zeros > 0, 0, others))
            result = hlo.select(is_zero | is_nan, mine * others, mine * read(output, where) / data)
    inside = _beside(segment < counts.shape[-1], data)
    return hlo.select(inside, result, 0)
