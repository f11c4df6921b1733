"""Special functions: gamma and its relatives, the error function's relatives, entropy and logit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import elementwise
from torch_tpu.ops.math import cephes


def polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Horner's rule, highest order first."""
    result = hlo.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        result = result * x + c
    return result


def rational(x: Array, numerator: tuple[float, ...], denominator: tuple[float, ...]) -> Array:
    return polynomial(x, numerator) / polynomial(x, denominator)


# --- products with a logarithm -----------------------------------------------------------------------------------


def _x_times_log(x: ArrayLike, y: ArrayLike, log_of: Array) -> Array:
    """x · log, 0 where x is 0 unless y is NaN."""
    x = _array(x, log_of)
    result = hlo.select(x.eq(0), 0, x * log_of)
    return hlo.select(hlo.is_nan(y), math.nan, result) if isinstance(y, Array) else result


def _array(y: ArrayLike, like: ArrayLike) -> Array:
    if isinstance(y, Array):
        return y
    assert isinstance(like, Array)
    return hlo.constant(y, like.dtype)


@elementwise("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
def xlogy(x: ArrayLike, y: ArrayLike) -> Array:
    return _x_times_log(x, y, hlo.log(_array(y, x)))


@elementwise("special_xlog1py", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar")
def xlog1py(x: ArrayLike, y: ArrayLike) -> Array:
    return _x_times_log(x, y, hlo.log1p(_array(y, x)))


@elementwise("special_entr")
def entr(x: Array) -> Array:
    """-x log x; 0 at 0, -∞ below."""
    value = hlo.select(x > 0, -x * hlo.log(x), hlo.select(x.eq(0), 0, hlo.full_like(x, -math.inf)))
    return hlo.select(hlo.is_nan(x), x, value)


@elementwise("logit")
def logit(x: Array, eps: ArrayLike | None = None) -> Array:
    if eps is not None:
        x = hlo.clamp(eps, x, 1 - eps)
    return hlo.log(x / (1 - x))


# --- gamma -------------------------------------------------------------------------------------------------------


@elementwise("lgamma")
def lgamma(x: Array) -> Array:
    return hlo.lgamma(x)


@elementwise("digamma")
def digamma(x: Array) -> Array:
    """∓∞ at ±0, where CHLO has NaN as at the other poles."""
    at_zero = hlo.select(hlo.bitcast(x, _integer(x)) < 0, math.inf, hlo.full_like(x, -math.inf))
    return hlo.select(x.eq(0), at_zero, hlo.digamma(x))


def _integer(x: Array) -> torch.dtype:
    return torch.int64 if x.dtype is torch.float64 else torch.int32


@elementwise("polygamma")
def polygamma(n: int, x: Array) -> Array:
    """(-1)ⁿ⁺¹ n! ζ(n+1, x)."""
    if n < 2:
        return trigamma(x) if n else digamma(x)
    return _zeta(hlo.full_like(x, n + 1), x) * (math.factorial(n) * (-1) ** (n + 1))


def trigamma(x: Array) -> Array:
    """Reflected below ½, six steps of the recurrence, then the asymptotic series."""
    is_left = x < 0.5
    reflection = hlo.square(math.pi / hlo.sin(x * math.pi))
    x = hlo.select(is_left, 1 - x, x)
    result = hlo.full_like(x, 0)
    for _ in range(6):
        result = result + 1 / (x * x)
        x = x + 1
    square = 1 / (x * x)
    result = result + (1 + 0.5 / x + square * (1 / 6 - square * (1 / 30 - square * (1 / 42)))) / x
    return hlo.select(is_left, reflection - result, result)


@elementwise("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar")
def zeta(x: ArrayLike, q: ArrayLike) -> Array:
    return _zeta(_array(x, q), _array(q, x))


def _zeta(x: Array, q: Array) -> Array:
    """Hurwitz's ζ(x, q). From a negative q on, terms below and above 0 are added in pairs: they may cancel."""
    shape = hlo.broadcast_shapes(x.shape, q.shape)
    x, q = hlo.broadcast_to(x, shape), hlo.broadcast_to(q, shape)
    is_pole = (q <= 0) & q.eq(hlo.floor(q))
    below = hlo.select(q < 0, hlo.ceil(-q), 0)
    shifted = q + 2 * below

    def unfinished(k: Array, total: Array) -> Array:
        return structured.reduce_or(~is_pole & (k < below), range(q.ndim)) & (k < 10000)

    def step(k: Array, total: Array) -> list[Array]:
        pair = hlo.power(q + k, -x) + hlo.power(q + (2 * below - 1 - k), -x)
        return [k + 1, total + hlo.select(k < below, pair, 0)]

    initial = [hlo.constant(0, q.dtype), hlo.full_like(q, 0)]
    _, total = structured.while_loop(initial, unfinished, step)
    result = total + hlo.zeta(x, shifted)
    result = hlo.select(x.eq(1) | is_pole, math.inf, result)
    return hlo.select(x < 1, math.nan, result)


def _in_float64(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Computes in float64: exp(a log x - x - log Γ(a)) loses all its digits in float32 for a beyond some hundreds."""

    def wide(a: Array, x: Array) -> Array:
        shape = hlo.broadcast_shapes(a.shape, x.shape)
        return function(*(hlo.broadcast_to(hlo.convert(v, torch.float64), shape) for v in (a, x)))

    return wide


def _gamma_density(a: Array, x: Array) -> Array:
    """xᵃ exp(-x) / Γ(a)."""
    return hlo.exp(a * hlo.log(x) - x - hlo.lgamma(a))


def _lower_gamma_series(a: Array, x: Array, wanted: Array) -> Array:
    """P(a, x) by its power series: Σ xᵏ / ((a+1)…(a+k)) · density / a."""

    def unfinished(k: Array, term: Array, total: Array) -> Array:
        return structured.reduce_or(wanted & (term > total * 1e-17), range(total.ndim)) & (k < 10000)

    def step(k: Array, term: Array, total: Array) -> list[Array]:
        term = term * x / (a + k)
        return [k + 1, term, total + term]

    one = hlo.full_like(x, 1)
    total = structured.while_loop([hlo.constant(1.0, x.dtype), one, one], unfinished, step)[2]
    return total * _gamma_density(a, x) / a


def _upper_gamma_fraction(a: Array, x: Array, wanted: Array) -> Array:
    """Q(a, x) by Lentz's evaluation of Legendre's continued fraction."""
    tiny = 1e-300

    def nonzero(v: Array) -> Array:
        return hlo.select(hlo.abs_(v) < tiny, tiny, v)

    def unfinished(k: Array, b: Array, c: Array, d: Array, h: Array, change: Array) -> Array:
        return structured.reduce_or(wanted & (hlo.abs_(change - 1) > 1e-16), range(h.ndim)) & (k < 10000)

    def step(k: Array, b: Array, c: Array, d: Array, h: Array, change: Array) -> list[Array]:
        numerator = k * (a - k)
        b = b + 2
        d = 1 / nonzero(numerator * d + b)
        c = nonzero(b + numerator / c)
        return [k + 1, b, c, d, h * c * d, c * d]

    b = x + 1 - a
    d = 1 / nonzero(b)
    initial = [hlo.constant(1.0, x.dtype), b, hlo.full_like(x, 1 / tiny), d, d, hlo.full_like(x, 0)]
    return structured.while_loop(initial, unfinished, step)[4] * _gamma_density(a, x)


def _incomplete_gamma(a: Array, x: Array, *, upper: bool) -> Array:
    """Regularised: the series where x ≤ a + 1, the continued fraction elsewhere, each on arguments it converges for."""
    use_fraction = x > a + 1
    proper = (x > 0) & (a > 0) & hlo.is_finite(x) & hlo.is_finite(a)
    series = _lower_gamma_series(a, x, proper & ~use_fraction)
    fraction = _upper_gamma_fraction(a, x, proper & use_fraction)
    result = hlo.select(use_fraction, *((fraction, 1 - series) if upper else (1 - fraction, series)))
    nothing, everything = (1.0, 0.0) if upper else (0.0, 1.0)
    # The CPU's order of precedence decides what meets NaN.
    result = hlo.select(hlo.is_nan(x) | hlo.is_nan(a), math.nan, result)
    result = hlo.select(x.eq(math.inf), everything, result)
    result = hlo.select(a.eq(math.inf), hlo.select(x.eq(math.inf), math.nan, hlo.full_like(x, nothing)), result)
    result = hlo.select(x.eq(0), nothing, result)
    result = hlo.select(a.eq(0), hlo.select(x > 0, everything, hlo.full_like(x, math.nan)), result)
    return hlo.select((x < 0) | (a < 0), math.nan, result)


elementwise("igamma")(_in_float64(lambda a, x: _incomplete_gamma(a, x, upper=False)))
elementwise("igammac")(_in_float64(lambda a, x: _incomplete_gamma(a, x, upper=True)))


# --- the error function's relatives ------------------------------------------------------------------------------


@elementwise("special_erfcx")
def erfcx(x: Array) -> Array:
    """exp(x²) erfc(x): by Cephes' rational functions from 1 on, as they are; 2 exp(x²) - erfcx(-x) below 0."""
    t = hlo.abs_(x)
    square = hlo.exp(x * x)
    inner = square * hlo.erfc(t)
    middle = rational(t, cephes.ERFCX_P, cephes.ERFCX_Q)
    # In 1/t, so that large arguments don't overflow.
    outer = rational(1 / t, cephes.ERFCX_R[::-1], cephes.ERFCX_S[::-1]) / t
    positive = hlo.select(t < 1, inner, hlo.select(t < 8, middle, outer))
    return hlo.select(x < 0, 2 * square - positive, positive)


@elementwise("special_log_ndtr")
def log_ndtr(x: Array) -> Array:
    t = x * math.sqrt(0.5)
    return hlo.select(x < -1, hlo.log(erfcx(-t) * 0.5) - t * t, hlo.log1p(hlo.erfc(t) * -0.5))


@elementwise("special_ndtri")
def ndtri(y: Array) -> Array:
    """The inverse of the normal distribution function, by Cephes."""
    tail = math.exp(-2)
    is_upper = y > 1 - tail
    p = hlo.select(is_upper, 1 - y, y)
    centred = p - 0.5
    square = centred * centred
    centre = (centred + centred * (square * rational(square, cephes.NDTRI_P0, cephes.NDTRI_Q0))) * math.sqrt(
        2 * math.pi
    )
    x = hlo.sqrt(-2 * hlo.log(p))
    z = 1 / x
    correction = hlo.select(
        x < 8, rational(z, cephes.NDTRI_P1, cephes.NDTRI_Q1), rational(z, cephes.NDTRI_P2, cephes.NDTRI_Q2)
    )
    outside = x - hlo.log(x) / x - z * correction
    result = hlo.select(p > tail, centre, hlo.select(is_upper, outside, -outside))
    result = hlo.select(y.eq(0), -math.inf, hlo.select(y.eq(1), math.inf, result))
    return hlo.select((y < 0) | (y > 1), math.nan, result)
