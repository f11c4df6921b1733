"""Medians and k-th smallest elements. NaN counts as the largest value, of equal elements the earlier as smaller."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.indexing import at_least_1d
from torch_tpu.ops.reduction import index_dtype, keep_dimensions, require_extreme
from torch_tpu.ops.scan import number_itself
from torch_tpu.ops.sorting import NARROW, ordering_key, take_along, top_positions

# So many smallest elements are found by XLA's top-k.
_FEW = 64


def _bisect(low: Array, high: Array, count_up_to: Callable[[Array], Array], position: Array) -> Array:
    """The least integer of low … high up to which `count_up_to` counts more than `position`; there must be one."""

    def undecided(low: Array, high: Array) -> Array:
        return structured.reduce_or(low < high, range(low.ndim))

    def halve(low: Array, high: Array) -> list[Array]:
        middle = (low & high) + hlo.shift_right_arithmetic(low ^ high, 1)  # whose sum might not fit
        enough = count_up_to(middle) > position
        return [hlo.select(enough, low, middle + 1), hlo.select(enough, middle, high)]

    return structured.while_loop([low, high], undecided, halve)[0]


def _place_of(x: Array, dim: int, position: Array) -> Array:
    """Where in `x` stands what would stand at `position` of its sorted order (both of size 1 along `dim`).

    Both the element and, among equal ones, its place are found by halving the range they can be in: a pass over the
    data per bit, most of which a sort would take longer than.
    """

    def reduced(reduce: Callable[..., Array], x: Array) -> Array:
        return keep_dimensions(reduce(x, [dim]), x, [dim])

    def count(condition: Array) -> Array:
        return reduced(structured.reduce_sum, hlo.convert(condition, dtype))

    size = x.shape[dim]
    dtype = index_dtype(size)
    position = hlo.convert(position, dtype)
    key = structured.optimization_barrier(ordering_key(x))
    least, greatest = reduced(structured.reduce_min, key), reduced(structured.reduce_max, key)
    element = _bisect(least, greatest, lambda limit: count(key <= limit), position)
    position = position - count(key < element)
    places = hlo.iota(key.shape, dim, dtype)
    found = key.eq(element)
    first = reduced(structured.reduce_min, hlo.select(found, places, size))
    last = hlo.select(position.eq(0), first, reduced(structured.reduce_max, hlo.select(found, places, -1)))
    return _bisect(first, last, lambda limit: count(found & (places <= limit)), position)


def _results_at(x: Array, dim: int, place: Array, out: list[Spec]) -> list[Array]:
    results = take_along(x, place, dim), hlo.convert(place, torch.int64)
    return [hlo.reshape(r, spec.shape) for r, spec in zip(results, out, strict=True)]


@lower("kthvalue")
def kthvalue(x: Array, k: int, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    if not x.ndim:
        return number_itself(x)
    dim %= x.ndim
    if x.size and x.dtype in NARROW and k <= _FEW < x.shape[dim]:
        # XLA would make a sort of a top-k of which only the last is read.
        smallest = structured.optimization_barrier(top_positions(x, k, dim, False))
        return _results_at(x, dim, hlo.slice_in_dim(smallest, k - 1, k, dim=dim), out)
    shape = [1 if d == dim else size for d, size in enumerate(x.shape)]
    if not x.size:
        return [hlo.zeros(spec.shape, spec.dtype) for spec in out]
    return _results_at(x, dim, _place_of(x, dim, hlo.full(shape, k - 1, torch.int32)), out)


def _median_position(x: Array, dim: int, skip_nan: bool) -> Array:
    """Where in sorted order the (lower) median stands: that of the numbers, or the first NaN if it counts."""
    size = x.shape[dim]
    nans = structured.reduce_sum(hlo.convert(hlo.broadcast_to(hlo.is_nan(x), x.shape), torch.int32), [dim])
    if skip_nan:
        position = hlo.maximum(hlo.shift_right_arithmetic(size - 1 - nans, 1), 0)
    else:
        position = hlo.select(nans > 0, size - nans, (size - 1) // 2)
    return keep_dimensions(position, x, [dim])


@lower("median.dim")
def median_dim(x: Array, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    return _median_along(x, dim, False, out)


@lower("nanmedian.dim")
def nanmedian_dim(x: Array, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    return _median_along(x, dim, True, out)


def _median_along(x: Array, dim: int, skip_nan: bool, out: list[Spec]) -> list[Array]:
    require_extreme("median", x, dim)
    x = at_least_1d(x)
    dim %= x.ndim
    if not x.size:
        return [hlo.zeros(spec.shape, spec.dtype) for spec in out]
    return _results_at(x, dim, _place_of(x, dim, _median_position(x, dim, skip_nan)), out)


@lower("median")
def median(x: Array) -> Array:
    return _median_of_all(x, False)


@lower("nanmedian")
def nanmedian(x: Array) -> Array:
    return _median_of_all(x, True)


def _median_of_all(x: Array, skip_nan: bool) -> Array:
    if not x.size:
        return hlo.full((), hlo.lowest(x.dtype) if not x.dtype.is_floating_point else float("nan"), x.dtype)
    x = hlo.reshape(x, [-1])
    return hlo.reshape(take_along(x, _place_of(x, 0, _median_position(x, 0, skip_nan)), 0), ())
