"""Samples whose distribution is given by tensors: categories, counts and gamma variates."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.types import type_name
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.random_bits import Rng, high_product
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import elements, read
from torch_tpu.ops.reduction import first_extreme
from torch_tpu.ops.scan import cumulative_sum

# --- categories --------------------------------------------------------------------------------------------------


@lower("multinomial")
def multinomial(
    p: Array,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: None,
    out: Spec,
    rng: Rng,
    check: Check,
) -> Array:
    categories = p.shape[-1] if p.ndim else 0
    if not p.dtype.is_floating_point:
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {p.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > categories:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    rows = hlo.reshape(hlo.convert(p, compute_dtype(p.dtype)), (-1 if categories else 0, categories))
    total = structured.reduce_sum(rows, [1])
    valid = structured.reduce_and((rows >= 0) & (rows < math.inf), [0, 1])
    positive = structured.reduce_and(total > 0, [0])
    check(valid, "probability tensor contains either `inf`, `nan` or element < 0", RuntimeError)
    check(positive, "invalid multinomial distribution (sum of probabilities <= 0)", RuntimeError)
    if not rows.size:
        return hlo.zeros(out.shape, torch.int64)
    chosen = _with_replacement(rows, total, num_samples, rng) if replacement else _in_a_race(rows, num_samples, rng)
    return hlo.reshape(hlo.convert(chosen, torch.int64), out.shape)


def _in_a_race(p: Array, count: int, rng: Rng) -> Array:
    """The first `count` to arrive where category i takes an exponential time of rate p[i] (Efraimidis, 2006)."""
    speed = p / -hlo.log(rng.open_uniform(p.shape, p.dtype))
    if count == 1:
        return hlo.expand_dims(first_extreme(speed, 1, structured.reduce_max)[1], 1)
    order = hlo.broadcast_in_dim(hlo.iota(p.shape[1:], 0, torch.int32), p.shape, [1])
    ranked = structured.sort([speed, order], 1, lambda a, b, i, j: a > b)[1]
    return hlo.slice_in_dim(ranked, 0, count, dim=1)


def _with_replacement(p: Array, total: Array, count: int, rng: Rng) -> Array:
    """By inversion, in integers: their sums are exact, so a category of probability 0 is never chosen."""
    share = hlo.convert(p / hlo.expand_dims(total, 1), torch.float64)
    weights = hlo.convert(share * 2.0**52, torch.uint64)
    upper = cumulative_sum(weights, 1)
    last = hlo.slice_in_dim(upper, p.shape[1] - 1, p.shape[1], dim=1)
    wanted = high_product(rng.bits((p.shape[0], count), torch.uint64), hlo.broadcast_to(last, (p.shape[0], count)))

    def halve(_: Array, low: Array, high: Array) -> list[Array]:
        middle = hlo.shift_right_logical(low + high, 1)
        above = read(upper, elements(upper.shape, 1, middle)) > wanted
        return [hlo.select(above, low, middle + 1), hlo.select(above, middle, high)]

    zero = hlo.zeros(wanted.shape, torch.int32)
    return structured.fori_loop(p.shape[1].bit_length(), halve, [zero, zero + (p.shape[1] - 1)])[0]


# --- rejection ---------------------------------------------------------------------------------------------------

# Per element and round, as many 32-bit words are set aside; after the last round the last proposal stays.
_WORDS = 16
_ROUNDS = 128


def accepted(
    shape: tuple[int, ...], dtype: torch.dtype, rng: Rng, propose: Callable[[Rng], tuple[Array, Array]]
) -> Array:
    """For each element the first proposal that is accepted.

    Args:
        propose: makes a value for every element, and says which of them are accepted.
    """
    start = rng.position()
    stride = math.prod(shape) * _WORDS // 4
    rng.skip(stride * 4 * _ROUNDS)

    def again(i: Array, value: Array, done: Array) -> Array:
        return (i < _ROUNDS) & ~structured.reduce_and(done, range(done.ndim))

    def attempt(i: Array, value: Array, done: Array) -> list[Array]:
        zero = hlo.constant(0, torch.uint64)
        proposal, accept = propose(Rng(start + hlo.stack([zero, hlo.convert(i, torch.uint64) * stride], 0)))
        return [i + 1, hlo.select(done, value, proposal), done | accept]

    initial = [hlo.constant(0, torch.int32), hlo.zeros(shape, dtype), hlo.full(shape, False, torch.bool)]
    return structured.while_loop(initial, again, attempt)[1]


def _standard_gamma(alpha: Array, rng: Rng) -> Array:
    """Marsaglia and Tsang, ACM TOMS 26 (2000): a gamma variate is a cubed normal; for alpha < 1, one of alpha + 1."""
    dtype, shape = alpha.dtype, alpha.shape
    small = alpha < 1
    d = hlo.select(small, alpha + 1, alpha) - 1 / 3
    c = 1 / hlo.sqrt(9 * d)

    def propose(source: Rng) -> tuple[Array, Array]:
        x, u = source.normal(shape, dtype), source.open_uniform(shape, dtype)
        v = 1 + c * x
        cube = v * v * v
        return d * cube, (v > 0) & (hlo.log(u) < 0.5 * x * x + d - d * cube + d * hlo.log(cube))

    boost = hlo.power(rng.open_uniform(shape, dtype), 1 / alpha)
    variate = accepted(shape, dtype, rng, propose)
    return hlo.select(small, variate * boost, variate)


@lower("_standard_gamma")
def standard_gamma(alpha: Array, generator: None = None, *, out: Spec, rng: Rng) -> Array:
    smallest = torch.finfo(out.dtype).tiny
    return hlo.maximum(_standard_gamma(hlo.convert(alpha, compute_dtype(out.dtype)), rng), smallest)


@lower("_sample_dirichlet")
def sample_dirichlet(alpha: Array, generator: None = None, *, rng: Rng) -> Array:
    variates = hlo.maximum(_standard_gamma(hlo.convert(alpha, torch.float64), rng), 1e-300)
    return hlo.convert(variates / hlo.expand_dims(structured.reduce_sum(variates, [alpha.ndim - 1]), -1), alpha.dtype)


# --- counts ------------------------------------------------------------------------------------------------------


def _counted(first: Array, ratio: Callable[[Array], Array], limit: Array, rng: Rng) -> Array:
    """Inversion: the first k at which the distribution function passes a uniform.

    Args:
        first: the probability of 0; that of k is ratio(k) times that of k - 1.
        limit: the largest possible count.
    """
    u = rng.uniform(first.shape, torch.float64)

    def unfinished(k: Array, p: Array, below: Array) -> Array:
        return (below <= u) & (k < limit) & (p > 0)

    def step(k: Array, p: Array, below: Array) -> list[Array]:
        more = unfinished(k, p, below)
        p_next = p * ratio(k + 1)
        return [hlo.select(more, k + 1, k), hlo.select(more, p_next, p), hlo.select(more, below + p_next, below)]

    def again(k: Array, p: Array, below: Array) -> Array:
        return structured.reduce_or(unfinished(k, p, below), range(k.ndim))

    return structured.while_loop([hlo.full_like(first, 0), first, first], again, step)[0]


@lower("poisson")
def poisson(rate: Array, generator: None = None, *, out: Spec, rng: Rng, check: Check) -> Array:
    """Inversion for rates below 10, else transformed rejection (PTRS, Hörmann, 1993)."""
    if not rate.dtype.is_floating_point:
        raise NotImplementedError(f"poisson is not implemented for {rate.dtype}")
    fine = structured.reduce_and(rate >= 0, range(rate.ndim))
    check(fine, "invalid Poisson rate, expected rate to be non-negative", RuntimeError)
    rate = hlo.convert(rate, torch.float64)
    small = rate < 10
    low = hlo.select(small, rate, 0)
    few = _counted(hlo.exp(-low), lambda k: low / k, hlo.full_like(rate, math.inf), rng)

    large = hlo.select(small, 10, rate)
    b = 0.931 + 2.53 * hlo.sqrt(large)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)

    def propose(source: Rng) -> tuple[Array, Array]:
        u, v = (source.open_uniform(rate.shape, torch.float64) for _ in range(2))
        k, us = _hat(u, a, b, large + 0.43)
        ratio = k * hlo.log(large) - large - hlo.lgamma(k + 1)
        inside = hlo.log(v * inverse_alpha / (a / (us * us) + b)) <= ratio
        return k, _squeezed(us, v, 0.9277 - 3.6224 / (b - 2), inside & (k >= 0)) | small

    return hlo.select(small, few, accepted(rate.shape, torch.float64, rng, propose))


def _hat(u: Array, a: Array, b: Array, centre: Array) -> tuple[Array, Array]:
    """A proposal of Hörmann's transformed rejection, and the distance of its uniform from the nearer end."""
    us = 0.5 - hlo.abs_(u - 0.5)
    return hlo.floor((2 * a / us + b) * (u - 0.5) + centre), us


def _squeezed(us: Array, v: Array, quick: Array, exact: Array) -> Array:
    """Accepted at once in the middle of the hat, else by the exact ratio."""
    return ((us >= 0.07) & (v <= quick)) | exact


@lower("binomial")
def binomial(count: Array, prob: Array, generator: None = None, *, rng: Rng) -> Array:
    """Inversion where n·p is below 10, else transformed rejection (BTRS, Hörmann, 1993); p above 1/2 is mirrored."""
    if not (count.dtype.is_floating_point and prob.dtype.is_floating_point):
        raise ValueError(f"binomial only supports floating-point dtypes for count, got: {count.dtype}")
    if count.dtype is not prob.dtype:
        raise RuntimeError(f"Found dtype {type_name(prob.dtype)} but expected {type_name(count.dtype)}")
    shape = hlo.broadcast_shapes(count.shape, prob.shape)
    n, p = (hlo.broadcast_to(hlo.convert(x, torch.float64), shape) for x in (count, prob))
    mirrored = p > 0.5
    q = hlo.clamp(0, hlo.select(mirrored, 1 - p, p), 1)
    small = n * q < 10
    low = hlo.select(small, q, 0)
    first = hlo.exp(n * hlo.log1p(-low))
    few = _counted(first, lambda k: (n - k + 1) / k * (low / (1 - low)), n, rng)

    n_large, q_large = hlo.select(small, 40, n), hlo.select(small, 0.5, q)
    spread = hlo.sqrt(n_large * q_large * (1 - q_large))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * q_large
    mode = hlo.floor((n_large + 1) * q_large)
    odds = hlo.log(q_large / (1 - q_large))

    def log_ways(k: Array) -> Array:
        return -hlo.lgamma(k + 1) - hlo.lgamma(n_large - k + 1)

    def propose(source: Rng) -> tuple[Array, Array]:
        u, v = (source.open_uniform(shape, torch.float64) for _ in range(2))
        k, us = _hat(u, a, b, n_large * q_large + 0.5)
        possible = (k >= 0) & (k <= n_large)
        ratio = log_ways(k) - log_ways(mode) + (k - mode) * odds
        inside = hlo.log(v * (2.83 + 5.1 / b) * spread / (a / (us * us) + b)) <= ratio
        return k, (_squeezed(us, v, 0.92 - 4.2 / b, inside) & possible) | small

    found = hlo.select(small, few, accepted(shape, torch.float64, rng, propose))
    return hlo.convert(hlo.select(mirrored, n - found, found), count.dtype)
