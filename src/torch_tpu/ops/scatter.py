"""Writing elements or slices along one dimension: scatter, index_add, index_copy, index_fill, masked_fill and kin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array, ArrayLike, Number
from torch_tpu.hlo.types import type_name
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import (
    OUT_OF_BOUNDS,
    OUT_OF_RANGE,
    IndexedElements,
    added,
    at_least_1d,
    check_bounds,
    combined,
    elements,
    read,
    region,
    replaced,
    wrapped,
)
from torch_tpu.ops.subscript import rank, true_elements

# --- scatter: one element for each index -------------------------------------------------------------------------


def _target(x: Array, dim: int, index: Array, check: Check) -> tuple[Array, IndexedElements]:
    """`x` with at least one dimension, and the region `index` addresses in it."""
    x, index = at_least_1d(x), at_least_1d(index)
    dim %= x.ndim
    check_bounds(check, index, x.shape[dim], OUT_OF_BOUNDS.format(dim=dim, size=x.shape[dim]), RuntimeError)
    return x, elements(x.shape, dim, index)


def _source(source: Array, where: IndexedElements) -> Array:
    """The part of a source, which may be larger than the index, that is scattered."""
    return hlo.slice_(at_least_1d(source), [0] * len(where.shape), where.shape)


@lower("scatter.src")
def scatter(x: Array, dim: int, index: Array, source: Array, *, check: Check) -> Array:
    target, where = _target(x, dim, index, check)
    return hlo.reshape(replaced(target, where, _source(source, where)), x.shape)


@lower("scatter.value")
def scatter_value(x: Array, dim: int, index: Array, value: ArrayLike, *, check: Check) -> Array:
    target, where = _target(x, dim, index, check)
    return hlo.reshape(replaced(target, where, hlo.as_array(value, x.dtype)), x.shape)


@lower("scatter_add")
def scatter_add(x: Array, dim: int, index: Array, source: Array, *, check: Check) -> Array:
    target, where = _target(x, dim, index, check)
    return hlo.reshape(added(target, where, _source(source, where)), x.shape)


@lower("scatter.reduce")
def scatter_old_reduce(x: Array, dim: int, index: Array, source: Array, *, reduce: str, check: Check) -> Array:
    return scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}.get(reduce, reduce), check=check)


@lower("scatter.value_reduce")
def scatter_value_reduce(x: Array, dim: int, index: Array, value: ArrayLike, *, reduce: str, check: Check) -> Array:
    source = hlo.broadcast_to(hlo.as_array(value, x.dtype), index.shape)
    return scatter_old_reduce(x, dim, index, source, reduce=reduce, check=check)


@lower("scatter_reduce.two")
def scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True, check: Check
) -> Array:
    target, where = _target(x, dim, index, check)
    return hlo.reshape(_reduced(target, where, _source(source, where), reduce, include_self), x.shape)


_REDUCTIONS: dict[str, tuple[Callable[[Array, Array], Array], Callable[[torch.dtype], Number]]] = {
    "sum": (hlo.add, lambda dtype: 0),
    "mean": (hlo.add, lambda dtype: 0),
    "prod": (hlo.multiply, lambda dtype: 1),
    "amax": (hlo.maximum, hlo.lowest),
    "amin": (hlo.minimum, hlo.highest),
}


def _reduced(x: Array, where: IndexedElements, source: Array, reduce: str, include_self: bool) -> Array:
    """`x` with the source reduced into a region; without the old elements of that region unless `include_self`."""
    combine, neutral = _REDUCTIONS[reduce]
    if x.dtype is torch.bool:
        combine = hlo.or_ if combine in (hlo.add, hlo.maximum) else hlo.and_
    wide = hlo.convert(x, compute_dtype(x.dtype))
    initial = wide if include_self else replaced(wide, where, hlo.constant(neutral(wide.dtype), wide.dtype))
    total = combined(initial, where, source, combine)
    if reduce != "mean":
        return total
    count_dtype = torch.int32 if x.dtype is torch.bool else wide.dtype
    ones = hlo.full(x.shape, int(include_self), count_dtype)
    count = hlo.maximum(added(ones, where, hlo.constant(1, count_dtype)), 1)
    return _mean(total, hlo.convert(count, total.dtype))


def _mean(total: Array, count: Array) -> Array:
    """total/count, rounded down for integers."""
    quotient = total / count
    if total.dtype.is_floating_point or total.dtype.is_complex or total.dtype is torch.bool:
        return quotient
    exact = (quotient * count).eq(total)
    return hlo.select((total < 0) & ~exact, quotient - 1, quotient) if total.dtype.is_signed else quotient


# --- index_*: one slice for each index ---------------------------------------------------------------------------


def _slices(
    x: Array,
    dim: int,
    index: Array,
    check: Check,
    message: str,
    error: type[Exception] = IndexError,
    *,
    from_end: bool = False,
) -> tuple[Array, IndexedElements]:
    """`x` with at least one dimension, and the slices `index` addresses in it."""
    x, index = at_least_1d(x), at_least_1d(index)
    dim %= x.ndim
    size = x.shape[dim]
    # With nothing to write, only the kernels that say OUT_OF_RANGE look at the index.
    if x.size or message is OUT_OF_RANGE:
        check_bounds(check, index, size, message.format(dim=dim, size=size), error, low=-size if from_end else 0)
    return x, region(x.shape, {dim: wrapped(index, size) if from_end else index}, dim)


def _sources(source: Array, where: IndexedElements) -> Array:
    """A slice for each index."""
    source = at_least_1d(source)
    if source.size == math.prod(where.shape) and source.shape != where.shape and max(source.ndim, len(where.shape)) > 1:
        raise RuntimeError(f"source has the shape {list(source.shape)}, the slices to write have {list(where.shape)}")
    return hlo.reshape(source, where.shape)


@lower("index_add")
def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: ArrayLike = 1, check: Check) -> Array:
    if x.dtype is not source.dtype:
        raise RuntimeError(
            f"index_add_(): self ({type_name(x.dtype)}) and source ({type_name(source.dtype)}) must have the same "
            "scalar type"
        )
    if x.ndim > 1:
        target, where = _slices(x, dim, index, check, OUT_OF_BOUNDS, RuntimeError)
    else:
        target, where = _slices(x, dim, index, check, OUT_OF_RANGE)
    if isinstance(alpha, Array) or alpha != 1:
        wide = compute_dtype(x.dtype)
        factor = hlo.as_array(alpha, wide)
        source = hlo.convert(source, wide)
        source = source & factor if wide is torch.bool else source * factor
    return hlo.reshape(added(target, where, _sources(source, where)), x.shape)


@lower("index_copy")
def index_copy(x: Array, dim: int, index: Array, source: Array, *, check: Check) -> Array:
    if source.dtype is not x.dtype:
        raise RuntimeError(
            f"index_copy_(): self and source expected to have the same dtype, but got {x.dtype} and {source.dtype}"
        )
    target, where = _slices(x, dim, index, check, "index_copy_(): " + OUT_OF_BOUNDS)
    return hlo.reshape(replaced(target, where, _sources(source, where)), x.shape)


@lower("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: Array, dim: int, index: Array, value: ArrayLike, *, check: Check) -> Array:
    if index.dtype is not torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    target, where = _slices(x, dim, index, check, OUT_OF_BOUNDS, from_end=True)
    return hlo.reshape(replaced(target, where, hlo.as_array(value, x.dtype)), x.shape)


@lower("index_reduce")
def index_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True, check: Check
) -> Array:
    target, where = _slices(x, dim, index, check, OUT_OF_RANGE)
    return hlo.reshape(_reduced(target, where, _sources(source, where), reduce, include_self), x.shape)


# --- masks -------------------------------------------------------------------------------------------------------


@lower("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Array, mask: Array, value: ArrayLike) -> Array:
    if mask.dtype is not torch.bool:
        name = {torch.uint8: "unsigned char"}.get(mask.dtype, str(mask.dtype))
        raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {name}")
    return hlo.select(mask, hlo.as_array(value, x.dtype), x)


@lower("masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array, *, out: Spec, check: Check) -> Array:
    """The n-th true element of the mask takes the source's n-th element."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    mask = hlo.broadcast_to(mask, out.shape)
    nth = rank(mask)
    if mask.size:
        check(true_elements(nth) <= source.size, "Number of elements of source < number of ones in mask", RuntimeError)
    if not source.size:
        return x
    taken = read(source.reshape(-1), region((source.size,), {0: hlo.clamp(0, nth, source.size - 1)}))
    return hlo.select(mask, taken.reshape(*out.shape), x)


@lower("masked_scatter_backward")
def masked_scatter_backward(grad: Array, mask: Array, sizes: Sequence[int], *, out: Spec) -> Array:
    """The gradient of the source: zero for elements that were not used."""
    mask = hlo.broadcast_to(mask, grad.shape)
    flat = hlo.zeros((math.prod(out.shape),), grad.dtype)
    nth = hlo.select(mask.reshape(-1), rank(mask), flat.size)
    return replaced(flat, region(flat.shape, {0: nth}), grad.reshape(-1)).reshape(*out.shape)


# --- writing a view ----------------------------------------------------------------------------------------------


@lower("select_backward", data=["index"])
def select_backward(grad: Array, sizes: Sequence[int], dim: int, index: Array | int) -> Array:
    dim %= len(sizes)
    return _embedded(hlo.zeros(sizes, grad.dtype), hlo.expand_dims(grad, dim), dim, index, 1)


@lower("slice_backward", data=["start", "end"])
def slice_backward(
    grad: Array, sizes: Sequence[int], dim: int, start: Array | int, end: Array | int, step: int
) -> Array:
    return _embedded(hlo.zeros(sizes, grad.dtype), grad, dim % len(sizes), start, step)


@lower("select_scatter", data=["index"])
def select_scatter(x: Array, source: Array, dim: int, index: Array | int) -> Array:
    dim %= x.ndim
    return _embedded(x, hlo.convert(hlo.expand_dims(source, dim), x.dtype), dim, index, 1)


@lower("slice_scatter")
def slice_scatter(
    x: Array,
    source: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    dim %= x.ndim
    chosen = range(x.shape[dim])[start:end:step]
    shape = [len(chosen) if d == dim else size for d, size in enumerate(x.shape)]
    if list(source.shape) != shape:
        raise RuntimeError(
            "expected src to have a size equal to the slice of self. "
            f"src size = {list(source.shape)}, slice size = {shape}"
        )
    return _embedded(x, hlo.convert(source, x.dtype), dim, chosen.start, step)


def _embedded(x: Array, source: Array, dim: int, start: Array | int, step: int) -> Array:
    """`x` with the source at `start`, `start + step`, … of `dim`; a negative start counts from the end."""
    if not source.size:
        return x
    size, count = x.shape[dim], source.shape[dim]
    start = hlo.as_array(start, torch.int64)
    start = hlo.clamp(0, hlo.select(start < 0, start + size, start), size)
    if step > 1:
        # Spread out, with what is already there in between.
        position = hlo.iota(x.shape, dim, torch.int64) - start
        inside = (
            (position >= 0) & (position < count * step) & hlo.remainder(position, hlo.full_like(position, step)).eq(0)
        )
        spread = hlo.pad(source, 0, [0] * x.ndim, [0] * x.ndim, [step - 1 if d == dim else 0 for d in range(x.ndim)])
        return hlo.select(inside, _embedded(hlo.zeros(x.shape, x.dtype), spread, dim, start, 1), x)
    zero = hlo.constant(0, torch.int64)
    return hlo.dynamic_update_slice(x, source, [start if d == dim else zero for d in range(x.ndim)])
