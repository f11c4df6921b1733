"""Finding values among sorted ones and counting them in bins: searchsorted, bucketize, isin, histograms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import added, elements, read, region
from torch_tpu.ops.reduction import index_dtype, least_and_greatest
from torch_tpu.ops.sorting import sort

# --- binary search -----------------------------------------------------------------------------------------------


def binary_search(
    boundaries: Array, values: Array, goes_right: Callable[[Array, Array], Array], sorter: Array | None = None
) -> Array:
    """The position in the last dimension of `boundaries` where each value belongs.

    Args:
        boundaries: ascending, one sequence or one for each row of `values`.
        goes_right: of a boundary and a value, whether the value belongs behind the boundary.
        sorter: positions that put `boundaries` in ascending order.
    """
    size = boundaries.shape[-1]
    dtype = index_dtype(size)

    def at(sequence: Array, position: Array) -> Array:
        last = sequence.ndim - 1
        where = elements(sequence.shape, last, position) if last else region(sequence.shape, {0: position})
        return read(sequence, where)

    def halve(_: Array, low: Array, high: Array) -> list[Array]:
        middle = hlo.shift_right_arithmetic(low + high, 1)
        boundary = at(boundaries, middle if sorter is None else at(sorter, middle))
        undecided = low < high
        right = goes_right(boundary, values)
        return [
            hlo.select(undecided & right, middle + 1, low),
            hlo.select(undecided & ~right, middle, high),
        ]

    low = hlo.zeros(values.shape, dtype)
    if not size or not values.size:
        return low
    return structured.fori_loop(size.bit_length(), halve, [low, hlo.full_like(low, size)])[0]


@lower("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    boundaries: Array,
    values: Array,
    *,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: Array | None,
    common: torch.dtype,
) -> Array:
    """Comparisons in the negative, so that NaN goes where PyTorch's binary search puts it."""
    direction = "GT" if right or side == "right" else "GE"
    boundaries, values = hlo.convert(boundaries, common), hlo.convert(values, common)
    found = binary_search(boundaries, values, lambda b, v: ~hlo.compare(b, v, direction), sorter)
    return hlo.convert(found, torch.int32 if out_int32 else torch.int64)


@lower("bucketize.Tensor", "bucketize.Scalar")
def bucketize(values: Array, boundaries: Array, *, out_int32: bool, right: bool, common: torch.dtype) -> Array:
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
    return searchsorted(boundaries, values, out_int32=out_int32, right=right, side=None, sorter=None, common=common)


@lower("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def isin(values: Array, among: Array, *, assume_unique: bool, invert: bool, common: torch.dtype) -> Array:
    values, among = hlo.convert(values, common), hlo.reshape(hlo.convert(among, common), [-1])
    if among.size < 10 * max(values.size, 1) ** 0.145:  # PyTorch's own choice
        found = structured.reduce_or(hlo.expand_dims(values, -1).eq(among), [values.ndim])
    else:
        ordered = sort(among)[0]
        place = binary_search(ordered, values, lambda b, v: b < v)
        found = read(ordered, region(ordered.shape, {0: hlo.minimum(place, among.size - 1)})).eq(values)
    return ~found if invert else found


# --- histograms --------------------------------------------------------------------------------------------------


def count_in_bins(bins: int, positions: Array, weights: Array | None, dtype: torch.dtype) -> Array:
    """How many positions (or what weight) fall on each of 0 … bins-1; others don't count."""
    weights = hlo.full(positions.shape, 1, dtype) if weights is None else hlo.convert(weights, dtype)
    return added(hlo.zeros((bins,), dtype), region((bins,), {0: positions}), weights)


def _data_range(x: Array) -> tuple[Array, Array]:
    if not x.size:
        return hlo.constant(0, x.dtype), hlo.constant(1, x.dtype)
    return least_and_greatest(x)


def _check_finite(low: Array, high: Array, name: str, check: Check) -> None:
    if low.dtype.is_floating_point:
        finite = hlo.is_finite(low) & hlo.is_finite(high)
        wrong = hlo.select(hlo.is_finite(low), high, low)
        check(finite, f"{name}: range is not finite, it ends at {{}}", RuntimeError, wrong)


@lower("histc")
def histc(x: Array, bins: int, min: ArrayLike, max: ArrayLike, *, out: Spec, check: Check) -> Array:
    x = hlo.reshape(hlo.convert(x, compute_dtype(out.dtype)), [-1])
    low, high = (hlo.as_array(limit, x.dtype) for limit in (min, max))
    check(~(low > high), "torch.histc: max must be larger than min", RuntimeError)
    from_data = low.eq(high)
    low, high = (hlo.select(from_data, d, given) for d, given in zip(_data_range(x), (low, high), strict=True))
    _check_finite(low, high, "torch.histc", check)
    flat = low.eq(high)
    low, high = hlo.select(flat, low - 1, low), hlo.select(flat, high + 1, high)
    position = hlo.minimum(hlo.convert((x - low) * bins / (high - low), torch.int64), bins - 1)
    inside = (x >= low) & (x <= high)
    return count_in_bins(bins, hlo.select(inside, position, bins), None, x.dtype)


@lower("histogram.bin_ct")
def histogram(
    x: Array, bins: int, *, range: list[float] | None, weight: Array | None, density: bool, check: Check
) -> tuple[Array, Array]:
    edges = linear_edges(hlo.reshape(x, [-1]), bins, range, check)
    return histogram_between(x, edges, weight=weight, density=density), edges


def linear_edges(x: Array, bins: int, limits: list[float] | None, check: Check) -> Array:
    """bins + 1 equidistant edges over the given range or that of the data, computed from the nearer end."""
    if bins < 1:
        raise RuntimeError(f"torch.histogram(): bins must be > 0, but got {bins}")
    if limits is None:
        low, high = _data_range(x)
    else:
        low, high = (hlo.constant(limit, x.dtype) for limit in limits)
    _check_finite(low, high, "torch.histogram", check)
    flat = low.eq(high)
    low, high = hlo.select(flat, low - 0.5, low), hlo.select(flat, high + 0.5, high)
    step = (high - low) / bins
    index = hlo.iota((bins + 1,), 0, x.dtype)
    return hlo.select(index < (bins + 1) // 2, low + index * step, high - (bins - index) * step)


@lower("histogram.bins_tensor")
def histogram_of_edges(x: Array, edges: Array, *, weight: Array | None, density: bool) -> tuple[Array, Array]:
    return histogram_between(x, edges, weight=weight, density=density), edges


def _bin_of(x: Array, edges: Array) -> Array:
    """Bins are half open, the last one closed; what is in none gets their number."""
    bins = edges.shape[0] - 1
    place = binary_search(edges, x, lambda edge, v: edge <= v) - 1
    last = hlo.slice_in_dim(edges, bins, bins + 1)
    place = hlo.select(x.eq(last), bins - 1, place)
    return hlo.select((place < 0) | ~(x <= last), bins, place)


def _widths(edges: Array) -> Array:
    return hlo.slice_in_dim(edges, 1, edges.size) - hlo.slice_in_dim(edges, 0, edges.size - 1)


def histogram_between(x: Array, edges: Array, *, weight: Array | None, density: bool) -> Array:
    x = hlo.reshape(x, [-1])
    weights = None if weight is None else hlo.reshape(weight, [-1])
    counts = count_in_bins(edges.size - 1, _bin_of(x, edges), weights, x.dtype)
    return counts / (structured.reduce_sum(counts, [0]) * _widths(edges)) if density else counts


# --- histograms of points ----------------------------------------------------------------------------------------


def _edges_of_points(x: Array, bins: list[int], limits: list[float] | None, check: Check) -> list[Array]:
    """Equidistant edges for each coordinate."""
    if x.ndim < 2 or len(bins) != x.shape[-1]:
        raise RuntimeError("torch.histogramdd: bins must have one entry for each coordinate of the points")
    columns = hlo.reshape(x, [-1, x.shape[-1]])
    return [
        linear_edges(
            hlo.reshape(hlo.slice_in_dim(columns, d, d + 1, dim=1), [-1]),
            count,
            None if limits is None else limits[2 * d : 2 * d + 2],
            check,
        )
        for d, count in enumerate(bins)
    ]


@lower("_histogramdd_bin_edges")
def histogramdd_bin_edges(
    x: Array, bins: list[int], *, range: list[float] | None, weight: Array | None, density: bool, check: Check
) -> list[Array]:
    return _edges_of_points(x, bins, range, check)


@lower("_histogramdd_from_bin_cts")
def histogramdd(
    x: Array, bins: list[int], *, range: list[float] | None, weight: Array | None, density: bool, check: Check
) -> Array:
    return histogramdd_between(x, _edges_of_points(x, bins, range, check), weight=weight, density=density)


@lower("_histogramdd_from_bin_tensors")
def histogramdd_between(x: Array, edges: list[Array], *, weight: Array | None, density: bool) -> Array:
    if x.ndim < 2 or len(edges) != x.shape[-1]:
        raise RuntimeError("torch.histogramdd: there must be edges for each coordinate of the points")
    if weight is not None and weight.shape != x.shape[:-1]:
        raise RuntimeError("torch.histogramdd: weight must have the shape of the points without the last dimension")
    columns = hlo.reshape(x, [-1, x.shape[-1]])
    shape = [e.size - 1 for e in edges]
    cell, outside = hlo.zeros(columns.shape[:1], torch.int64), hlo.full(columns.shape[:1], False, torch.bool)
    for d, own in enumerate(edges):
        place = _bin_of(hlo.reshape(hlo.slice_in_dim(columns, d, d + 1, dim=1), [-1]), own)
        cell = cell * shape[d] + hlo.convert(place, torch.int64)
        outside = outside | place.eq(shape[d])
    count = math.prod(shape)
    weights = None if weight is None else hlo.reshape(weight, [-1])
    cells = hlo.reshape(count_in_bins(count, hlo.select(outside, count, cell), weights, x.dtype), shape)
    if not density:
        return cells
    cells = cells / structured.reduce_sum(cells, list(range(cells.ndim)))
    for d, own in enumerate(edges):
        cells = cells / hlo.reshape(_widths(own), [-1 if i == d else 1 for i in range(len(shape))])
    return cells
