"""Random numbers of the common distributions, dropout, permutations. All bits come from `Rng`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured, types
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype, elementwise
from torch_tpu.ops.core.random_bits import DIGITS, Rng, high_product
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.reduction import index_dtype

Draw = Callable[[Sequence[int], torch.dtype], Array]


def _drawn(out: Spec, draw: Draw) -> Array:
    """A draw of the result's shape; of a complex result, of its real and imaginary parts."""
    if not out.dtype.is_complex:
        return draw(out.shape, out.dtype)
    parts = draw((*out.shape, 2), types.REAL_PART[out.dtype])
    re, im = (hlo.squeeze(hlo.slice_in_dim(parts, i, i + 1, dim=-1), -1) for i in range(2))
    return hlo.complex_(re, im)


def _numbers(out: Spec, *values: ArrayLike) -> list[Any]:
    """Parameters of a distribution in the dtype in which the draw is computed."""
    return cast(list(values), compute_dtype(types.REAL_PART.get(out.dtype, out.dtype)))


# --- continuous --------------------------------------------------------------------------------------------------


@lower("uniform")
def uniform(x: Array, low: ArrayLike = 0.0, high: ArrayLike = 1.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    low, high = _numbers(out, low, high)
    return _drawn(out, lambda shape, dtype: rng.uniform(shape, dtype) * (high - low) + low)


@lower("normal_functional")
def normal(x: Array, mean: ArrayLike = 0.0, std: ArrayLike = 1.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    """Of a complex normal, either part has half the variance (and the whole mean)."""
    mean, std = _numbers(out, mean, std)
    if out.dtype.is_complex:
        std = std * math.sqrt(0.5)
    return _drawn(out, lambda shape, dtype: rng.normal(shape, dtype) * std + mean)


@lower("normal.float_Tensor", "normal.Tensor_Tensor")
def normal_of_deviations(mean: ArrayLike, std: Array, *, generator: None, out: Spec, rng: Rng, check: Check) -> Array:
    if not std.dtype.is_complex:
        fine = structured.reduce_and(std >= 0, range(std.ndim))
        check(fine, "normal expects all elements of std >= 0.0", RuntimeError)
    return normal_of_means(mean, std, generator=generator, out=out, rng=rng)


@lower("normal.Tensor_float")
def normal_of_means(mean: ArrayLike, std: ArrayLike = 1.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    mean, std = cast([mean, std], compute_dtype(out.dtype))
    scale = math.sqrt(0.5) if out.dtype.is_complex else 1
    return _drawn(out, rng.normal) * (std * scale) + mean


@lower("log_normal")
def log_normal(x: Array, mean: ArrayLike = 1.0, std: ArrayLike = 2.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    mean, std = _numbers(out, mean, std)
    return hlo.exp(rng.normal(out.shape, out.dtype) * std + mean)


@lower("exponential")
def exponential(x: Array, lambd: ArrayLike = 1.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    """Never 0, as PyTorch promises: its users divide by it."""
    (rate,) = _numbers(out, lambd)
    return -hlo.log(rng.open_uniform(out.shape, out.dtype)) / rate


@lower("cauchy")
def cauchy(x: Array, median: ArrayLike = 0.0, sigma: ArrayLike = 1.0, *, generator: None, out: Spec, rng: Rng) -> Array:
    median, sigma = _numbers(out, median, sigma)
    return hlo.tan((rng.open_uniform(out.shape, out.dtype) - 0.5) * math.pi) * sigma + median


# --- discrete ----------------------------------------------------------------------------------------------------


@lower("geometric")
def geometric(x: Array, p: ArrayLike, *, generator: None, out: Spec, rng: Rng) -> Array:
    """The number of trials up to the first success, by inversion."""
    dtype = compute_dtype(out.dtype) if out.dtype.is_floating_point else torch.float32
    trials = hlo.log(rng.open_uniform(out.shape, dtype)) / _log1p(cast(-p, dtype))
    return hlo.maximum(hlo.ceil(trials), 1)


def _log1p(x: ArrayLike) -> ArrayLike:
    return hlo.log1p(x) if isinstance(x, Array) else math.log1p(x)  # type: ignore[arg-type]


@lower("bernoulli")
def bernoulli(p: Array, *, generator: None, out: Spec, rng: Rng, check: Check) -> Array:
    if not p.dtype.is_floating_point:
        raise NotImplementedError(f"bernoulli is not implemented for probabilities of {p.dtype}")
    fine = structured.reduce_and((p >= 0) & (p <= 1), range(p.ndim))
    check(fine, "Expected p_in >= 0 && p_in <= 1 to be true, but got false.", RuntimeError)
    return _successes(p, out, rng)


@lower("bernoulli.Tensor")
def bernoulli_like(x: Array, p: Array, *, generator: None, out: Spec, rng: Rng, check: Check) -> Array:
    return bernoulli(p, generator=generator, out=out, rng=rng, check=check)


@lower("bernoulli.p")
def bernoulli_of_number(x: Array, p: ArrayLike, *, generator: None, out: Spec, rng: Rng) -> Array:
    return _successes(p, out, rng)


def _successes(p: ArrayLike, out: Spec, rng: Rng) -> Array:
    wide = isinstance(p, Array) and p.dtype is torch.float64
    dtype = torch.float64 if wide else torch.float32
    return hlo.convert(rng.uniform(out.shape, dtype) < cast(p, dtype), out.dtype)


@lower("random")
def random(x: Array, *, generator: None, out: Spec, rng: Rng) -> Array:
    """From 0 to the dtype's largest value, or to the largest up to which a float dtype has every integer."""
    return _integers(0, _last(out.dtype) + 1, out, rng)


@lower("random.to", data=["to"])
def random_to(x: Array, to: Array | int, *, generator: None, out: Spec, rng: Rng) -> Array:
    return _integers(0, to, out, rng)


@lower("random.from", data=["from", "to"])
def random_from(x: Array, low: Array | int, to: Array | int | None, *, generator: None, out: Spec, rng: Rng) -> Array:
    return _integers(low, _last(out.dtype) + 1 if to is None else to, out, rng)


def _last(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 1
    return 2 ** DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max


def _integers(low: Array | int, high: Array | int, out: Spec, rng: Rng) -> Array:
    """Uniform integers in [low, high): the high half of the product of random bits and the range (Lemire, 2019)."""
    low, high = (v if isinstance(v, Array) else hlo.constant(v % 2**64, torch.uint64) for v in (low, high))
    low, high = (hlo.convert(v, torch.uint64) for v in (low, high))
    count = high - low
    if out.dtype.itemsize < 4 or out.dtype is torch.int32:
        bits = hlo.convert(rng.bits(out.shape), torch.uint64)
        steps = hlo.shift_right_logical(bits * count, 32)
    else:
        bits = rng.bits(out.shape, torch.uint64)
        # A range of all 2**64 numbers wraps to 0.
        steps = hlo.select(count.eq(0), bits, high_product(bits, count))
    return hlo.convert(hlo.convert(steps + low, torch.int64), out.dtype)


@lower("randperm", "randperm.generator")
def randperm(n: int, *, out: Spec, rng: Rng, **options: Any) -> Array:
    """The order that sorts 64-bit random keys; on XLA:CPU a shuffle, twelve times as fast."""
    keys = rng.bits((n,), torch.uint64)
    if module.target().platform == "cpu" and n:
        return _shuffled(hlo.remainder(keys, hlo.iota((n,), 0, torch.uint64) + 1))
    return structured.sort([keys, hlo.iota((n,), 0, torch.int64)], 0, lambda a, b, i, j: a < b)[1]


def _shuffled(places: Array) -> Array:
    """0 … n-1, each put at its place among those before it; what stood there moves to the end (Fisher & Yates)."""

    def put(i: Array, result: Array) -> Array:
        place = hlo.dynamic_slice(places, [i], [1]).reshape()
        moved = hlo.dynamic_update_slice(result, hlo.dynamic_slice(result, [place], [1]), [i])
        return hlo.dynamic_update_slice(moved, hlo.convert(i, torch.int64).reshape(1), [place])

    places = hlo.convert(places, index_dtype(places.shape[0]))
    return structured.fori_loop(places.shape[0], put, [hlo.zeros(places.shape, torch.int64)])[0]


# --- dropout -----------------------------------------------------------------------------------------------------


@lower("native_dropout")
def native_dropout(x: Array, p: ArrayLike, train: bool | None, *, out: list[Spec], rng: Rng) -> tuple[Array, Array]:
    if train is False:
        return x, hlo.full(x.shape, True, torch.bool)
    wide = cast(x, compute_dtype(x.dtype))
    p = cast(p, wide.dtype)
    keep = rng.uniform(x.shape, wide.dtype) >= p
    return hlo.select(keep, wide / (1 - p), 0), keep


@elementwise("native_dropout_backward", "_masked_scale")
def native_dropout_backward(grad: Array, mask: Array, scale: ArrayLike) -> Array:
    return grad * mask * scale


@lower("_fused_dropout")
def fused_dropout(x: Array, p: ArrayLike, generator: None = None, *, out: list[Spec], rng: Rng) -> tuple[Array, Array]:
    """`p` is the probability that an element is kept."""
    wide = cast(x, compute_dtype(x.dtype))
    p = cast(p, wide.dtype)
    keep = rng.uniform(x.shape, wide.dtype) < p
    return hlo.select(keep, wide / p, 0), keep
