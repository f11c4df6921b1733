"""Cumulative sums, products, extremes and log-sum-exps along a dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, Number
from torch_tpu.hlo.structured import Combine
from torch_tpu.ops.promotion import compute_dtype
from torch_tpu.ops.reduction import index_dtype
from torch_tpu.ops.registry import Spec, lower


def scan(arrays: Sequence[Array], identity: Sequence[Number], dim: int, combine: Combine) -> list[Array]:
    """Prefixes of `dim` reduced by `combine`, which must be associative and commutative.

    One window over all earlier elements: XLA turns that into a scan of logarithmic depth.
    """
    x = arrays[0]
    if not x.ndim or not x.size:
        return list(arrays)
    dim %= x.ndim
    return structured.reduce_window(
        arrays,
        [hlo.constant(i, a.dtype) for i, a in zip(identity, arrays, strict=True)],
        combine,
        window=[size if d == dim else 1 for d, size in enumerate(x.shape)],
        padding=[(size - 1, 0) if d == dim else (0, 0) for d, size in enumerate(x.shape)],
    )


def cumulative_sum(x: Array, dim: int) -> Array:
    return scan([x], [0], dim, hlo.add)[0]


@lower("cumsum")
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None, out: Spec) -> Array:
    return cumulative_sum(hlo.convert(x, compute_dtype(out.dtype)), dim)


@lower("cumprod")
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None, out: Spec) -> Array:
    return scan([hlo.convert(x, compute_dtype(out.dtype))], [1], dim, hlo.multiply)[0]


@lower("cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, hlo.lowest(x.dtype), hlo.maximum)


@lower("cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running_extreme(x, dim, hlo.highest(x.dtype), hlo.minimum)


def _running_extreme(x: Array, dim: int, identity: Number, combine: Combine) -> tuple[Array, Array]:
    """The extreme so far (NaN wins) and the last position that has it: the last that was the extreme when it came."""
    values = scan([x], [identity], dim, combine)[0]
    if not x.ndim:
        return values, hlo.zeros((), torch.int64)
    reached = x.eq(values) | hlo.is_nan(x)
    positions = hlo.select(reached, hlo.iota(x.shape, dim % x.ndim, index_dtype(x.shape[dim])), -1)
    return values, hlo.convert(scan([positions], [-1], dim, hlo.maximum)[0], torch.int64)


@lower("logcumsumexp", "_logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    wide = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(scan([wide], [-math.inf], dim, _log_add_exp)[0], x.dtype)


def _log_add_exp(x: Array, y: Array) -> Array:
    """m + log(exp(x - m) + exp(y - m)), m the one with the larger real part; an infinite m is the result."""
    if not x.dtype.is_complex:
        largest = hlo.maximum(x, y)
        gap = hlo.select(x.eq(y), 0, hlo.negate(hlo.abs_(x - y)))
        return largest + hlo.log1p(hlo.exp(gap))
    largest = hlo.select(hlo.real(x) >= hlo.real(y), x, y)
    smaller = hlo.select(hlo.real(x) >= hlo.real(y), y, x)
    total = largest + hlo.log1p(hlo.exp(smaller - largest))
    return hlo.select(hlo.real(smaller).eq(-math.inf), largest, total)
