"""Sums, extremes, means, variances and logical reductions over dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, decompose, lower

Dimensions = Sequence[int] | int | None


def reduced_dimensions(x: Array, dim: Dimensions) -> list[int]:
    """Non-negative dimensions; none given means all of them."""
    if dim is None or dim == []:
        return list(range(x.ndim))
    return sorted({d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)}) if x.ndim else []


def keep_dimensions(reduced: Array, like: Array, dimensions: Sequence[int]) -> Array:
    """A reduction of `like` with its reduced dimensions put back as size 1, so that it broadcasts against `like`."""
    return hlo.reshape(reduced, [1 if d in dimensions else size for d, size in enumerate(like.shape)])


def index_dtype(size: int) -> torch.dtype:
    """The dtype in which positions below `size` are computed."""
    return torch.int32 if size < 2**31 else torch.int64


def least_and_greatest(x: Array) -> tuple[Array, Array]:
    """The extremes of all elements; NaN wins."""
    dimensions = range(x.ndim)
    if module.target().platform != "cpu":
        return structured.reduce_min(x, dimensions), structured.reduce_max(x, dimensions)
    # In one reduction: a million integers take 0.1 ms instead of 1.3, and a quarter of the time to compile.
    initial = [hlo.constant(end(x.dtype), x.dtype) for end in (hlo.highest, hlo.lowest)]
    least, greatest = structured.reduce(
        [x, x], initial, dimensions, lambda a, b, c, d: [hlo.minimum(a, c), hlo.maximum(b, d)]
    )
    return least, greatest


def _count(x: Array, dimensions: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dimensions)


# --- sums --------------------------------------------------------------------------------------------------------


@lower("sum.dim_IntList", "sum")
def sum_(
    x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None, out: Spec
) -> Array:
    wide = hlo.convert(x, compute_dtype(out.dtype))
    dims = reduced_dimensions(x, dim)
    if module.target().platform == "cpu" and wide.dtype.is_floating_point and _is_wide_column_sum(x, dims):
        return hlo.reshape(_column_sum(wide, len(dims)), out.shape)
    # Asked for as a bool, a sum says whether there is anything in it.
    add = structured.reduce_or if wide.dtype is torch.bool else structured.reduce_sum
    return hlo.reshape(add(wide, dims), out.shape)


# XLA:CPU sums such columns one after the other, each across all of memory: 128 rows of 32,768 numbers take 10 ms, as a
# product with ones 0.4.
_WIDE_COLUMNS = 4096


def _is_wide_column_sum(x: Array, dims: Sequence[int]) -> bool:
    rows, columns = _count(x, dims), math.prod(x.shape[len(dims) :])
    return dims == list(range(len(dims))) and rows > 1 and columns >= _WIDE_COLUMNS


def _column_sum(x: Array, count: int) -> Array:
    """The sum over the first `count` dimensions, flat."""
    rows = x.reshape(math.prod(x.shape[:count]), math.prod(x.shape[count:]))
    return structured.dot_general(hlo.full((1, rows.shape[0]), 1, x.dtype), rows, ([1], [0]), dtype=x.dtype)


@lower("nansum")
def nansum(x: Array, dim: Sequence[int] | None, keepdim: bool, *, dtype: torch.dtype | None, out: Spec) -> Array:
    return sum_(hlo.select(hlo.is_nan(x), 0, x), dim, keepdim, dtype=dtype, out=out)


@lower("mean.dim", "mean")
def mean(
    x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None, out: Spec
) -> Array:
    total = sum_(x, dim, keepdim, dtype=dtype, out=Spec(out.shape, compute_dtype(out.dtype)))
    return total / hlo.constant(_count(x, reduced_dimensions(x, dim)), total.dtype)


@lower("prod", "prod.dim_int")
def prod(x: Array, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None, out: Spec) -> Array:
    wide = hlo.convert(x, compute_dtype(out.dtype))
    return hlo.reshape(structured.reduce_product(wide, reduced_dimensions(x, dim)), out.shape)


@lower("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(x: Array, dim: Dimensions) -> Array:
    return structured.reduce_sum(hlo.convert(x.ne(0), torch.int64), reduced_dimensions(x, dim))


@lower("logsumexp")
def logsumexp(x: Array, dim: Sequence[int], keepdim: bool, *, out: Spec) -> Array:
    """m + log Σ exp(x - m) with m the largest (real part), or 0 where that is infinite."""
    x = hlo.convert(x, compute_dtype(out.dtype))
    dimensions = reduced_dimensions(x, dim)
    largest = structured.reduce_max(hlo.real(x), dimensions)
    largest = hlo.convert(hlo.select(hlo.abs_(largest).eq(math.inf), 0, largest), x.dtype)
    total = structured.reduce_sum(hlo.exp(x - keep_dimensions(largest, x, dimensions)), dimensions)
    return hlo.reshape(hlo.log(total) + largest, out.shape)


# --- logic -------------------------------------------------------------------------------------------------------


@lower("any", "any.dim", "any.dims")
def any_(x: Array, dim: Dimensions = None, keepdim: bool = False, *, out: Spec) -> Array:
    return hlo.reshape(structured.reduce_or(x.ne(0), _logical_dimensions(x, dim)), out.shape)


@lower("all", "all.dim", "all.dims")
def all_(x: Array, dim: Dimensions = None, keepdim: bool = False, *, out: Spec) -> Array:
    return hlo.reshape(structured.reduce_and(x.ne(0), _logical_dimensions(x, dim)), out.shape)


def _logical_dimensions(x: Array, dim: Dimensions) -> list[int]:
    """Unlike other reductions, `any` and `all` over an empty list of dimensions reduce nothing."""
    return [] if dim == [] else reduced_dimensions(x, dim)


# --- extremes ----------------------------------------------------------------------------------------------------

Reduce = Callable[[Array, Sequence[int]], Array]


def require_extreme(name: str, x: Array, dim: int | None = None) -> None:
    """Raises what PyTorch raises where there is no extreme: nothing to choose from, or no order."""
    if x.dtype.is_complex:
        raise NotImplementedError(f'"{name}" not implemented for complex numbers')
    if dim is None and not x.size:
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
            "the 'dim' argument."
        )
    if dim is not None and x.ndim and not x.shape[dim]:
        raise IndexError(f"{name}(): Expected reduction dim {dim % x.ndim} to have non-zero size.")


def first_extreme(x: Array, dim: int, reduce: Reduce) -> tuple[Array, Array]:
    """The extreme along one dimension (NaN wins) and the first position that has it."""
    if not x.ndim:
        return x, hlo.zeros((), torch.int64)
    size = x.shape[dim]
    extreme = reduce(x, [dim])
    wide = keep_dimensions(extreme, x, [dim])
    found = x.eq(wide) | (hlo.is_nan(x) & hlo.is_nan(wide)) if x.dtype.is_floating_point else x.eq(wide)
    positions = hlo.select(found, hlo.iota(x.shape, dim, index_dtype(size)), size)
    return extreme, hlo.convert(structured.reduce_min(positions, [dim]), torch.int64)


@lower("amax")
def amax(x: Array, dim: Dimensions = None, keepdim: bool = False, *, out: Spec) -> Array:
    return hlo.reshape(structured.reduce_max(x, reduced_dimensions(x, dim)), out.shape)


@lower("amin")
def amin(x: Array, dim: Dimensions = None, keepdim: bool = False, *, out: Spec) -> Array:
    return hlo.reshape(structured.reduce_min(x, reduced_dimensions(x, dim)), out.shape)


@lower("max")
def max_(x: Array, *, out: Spec) -> Array:
    require_extreme("max", x)
    return amax(x, out=out)


@lower("min")
def min_(x: Array, *, out: Spec) -> Array:
    require_extreme("min", x)
    return amin(x, out=out)


@lower("aminmax")
def aminmax(x: Array, *, dim: int | None, keepdim: bool, out: list[Spec]) -> tuple[Array, Array]:
    return amin(x, dim, out=out[0]), amax(x, dim, out=out[1])


@decompose("_aminmax", "_aminmax.dim")
def aminmax_of_all(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.aminmax(x, dim=dim, keepdim=keepdim)


@lower("max.dim")
def max_dim(x: Array, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    require_extreme("max", x, dim)
    return _with_positions(x, dim, structured.reduce_max, out)


@lower("min.dim")
def min_dim(x: Array, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    require_extreme("min", x, dim)
    return _with_positions(x, dim, structured.reduce_min, out)


def _with_positions(x: Array, dim: int, reduce: Reduce, out: list[Spec]) -> list[Array]:
    results = first_extreme(x, dim % max(x.ndim, 1), reduce)
    return [hlo.reshape(r, spec.shape) for r, spec in zip(results, out, strict=True)]


@lower("argmax")
def argmax(x: Array, dim: int | None, keepdim: bool, *, out: Spec) -> Array:
    require_extreme("argmax", x, dim)
    return _position(x, dim, structured.reduce_max, out)


@lower("argmin")
def argmin(x: Array, dim: int | None, keepdim: bool, *, out: Spec) -> Array:
    require_extreme("argmin", x, dim)
    return _position(x, dim, structured.reduce_min, out)


def _position(x: Array, dim: int | None, reduce: Reduce, out: Spec) -> Array:
    if dim is None:
        x, dim = hlo.reshape(x, [-1]), 0
    return hlo.reshape(first_extreme(x, dim % max(x.ndim, 1), reduce)[1], out.shape)


# --- variance ----------------------------------------------------------------------------------------------------


def variance(x: Array, dim: Dimensions, correction: ArrayLike | None) -> tuple[Array, Array]:
    """Σ|x - mean|² / max(n - correction, 0) and the mean, in the dtype PyTorch computes in. Two passes."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise RuntimeError("std and var only support floating point and complex dtypes")
    x = hlo.convert(x, compute_dtype(x.dtype))
    dimensions = reduced_dimensions(x, dim)
    count = _count(x, dimensions)
    mean = structured.reduce_sum(x, dimensions) / hlo.constant(count, x.dtype)
    deviation = x - keep_dimensions(mean, x, dimensions)
    magnitude = hlo.square(hlo.real(deviation))
    if x.dtype.is_complex:
        magnitude = magnitude + hlo.square(hlo.imag(deviation))
    squares = structured.reduce_sum(magnitude, dimensions)
    correction = 1 if correction is None else correction
    if not isinstance(correction, Array):
        correction = hlo.constant(correction, squares.dtype)
    return squares / hlo.maximum(count - hlo.convert(correction, squares.dtype), 0), mean


Correction = ArrayLike | None


@lower("var.correction")
def var(x: Array, dim: Dimensions, *, correction: Correction, keepdim: bool, out: Spec) -> Array:
    return hlo.reshape(variance(x, dim, correction)[0], out.shape)


@lower("std.correction")
def std(x: Array, dim: Dimensions, *, correction: Correction, keepdim: bool, out: Spec) -> Array:
    return hlo.sqrt(var(x, dim, correction=correction, keepdim=keepdim, out=out))


@lower("var_mean.correction")
def var_mean(x: Array, dim: Dimensions, *, correction: Correction, keepdim: bool, out: list[Spec]) -> list[Array]:
    return [hlo.reshape(r, spec.shape) for r, spec in zip(variance(x, dim, correction), out, strict=True)]


@lower("std_mean.correction")
def std_mean(x: Array, dim: Dimensions, *, correction: Correction, keepdim: bool, out: list[Spec]) -> list[Array]:
    var, mean = var_mean(x, dim, correction=correction, keepdim=keepdim, out=out)
    return [hlo.sqrt(var), mean]
