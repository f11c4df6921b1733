"""Exponentials, logarithms, roots, trigonometric, hyperbolic and error functions of real and complex tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import elementwise
from torch_tpu.ops.math import sine

Formula = Callable[[Array], Array]


def _log_base(base: float) -> Formula:
    return lambda x: hlo.log(x) * (1 / math.log(base))


# Functions that StableHLO or CHLO has as one operation, or nearly.
_UNARY: dict[str, Formula] = {
    "exp": hlo.exp,
    "expm1": hlo.expm1,
    "log": hlo.log,
    "log2": _log_base(2),
    "log10": _log_base(10),
    "log1p": hlo.log1p,
    "sqrt": hlo.sqrt,
    "rsqrt": hlo.rsqrt,
    "reciprocal": lambda x: 1 / x,
    "sin": sine.sin,
    "cos": sine.cos,
    "tan": hlo.tan,
    "asin": hlo.asin,
    "acos": hlo.acos,
    "atan": hlo.atan,
    "sinh": hlo.sinh,
    "cosh": hlo.cosh,
    "tanh": hlo.tanh,
    "asinh": hlo.asinh,
    "acosh": hlo.acosh,
    "atanh": hlo.atanh,
    "sigmoid": hlo.logistic,
    "erf": hlo.erf,
    "erfc": hlo.erfc,
    "erfinv": hlo.erf_inv,
}

for _name, _formula in _UNARY.items():
    elementwise(_name)(_formula)


@elementwise("exp2")
def exp2(x: Array) -> Array:
    return hlo.power(hlo.full_like(x, 2), x)


@elementwise("atan2")
def atan2(y: Array, x: Array) -> Array:
    return hlo.atan2(y, x)


@elementwise("hypot")
def hypot(x: Array, y: Array) -> Array:
    """√(x² + y²) without overflow of the squares; an infinity beside a NaN is infinity, as in C."""
    x, y = hlo.abs_(x), hlo.abs_(y)
    large, small = hlo.maximum(x, y), hlo.minimum(x, y)
    result = hlo.select(large.eq(0), 0, large * hlo.sqrt(1 + hlo.square(small / large)))
    return hlo.select(x.eq(math.inf) | y.eq(math.inf), math.inf, result)


def _log_add_exp(x: Array, y: Array, exp: Formula, log1p: Formula) -> Array:
    """Of two equal infinities the sum is that infinity, not NaN."""
    large, small = hlo.maximum(x, y), hlo.minimum(x, y)
    return hlo.select(x.eq(y) & ~hlo.is_finite(x), x, large + log1p(exp(small - large)))


@elementwise("logaddexp")
def logaddexp(x: Array, y: Array) -> Array:
    return _complex_log_add_exp(x, y) if x.dtype.is_complex else _log_add_exp(x, y, hlo.exp, hlo.log1p)


def _complex_log_add_exp(x: Array, y: Array) -> Array:
    """Ordered by real part; of two infinite ones the smaller where negative (the angle doesn't matter)."""
    is_less = hlo.real(x) < hlo.real(y)
    large, small = hlo.select(is_less, y, x), hlo.select(is_less, x, y)
    infinite = hlo.real(x).eq(hlo.real(y)) & ~hlo.is_finite(hlo.real(x))
    at_infinity = hlo.select(hlo.real(small) < 0, small, hlo.log(hlo.exp(small) + hlo.exp(large)))
    result = hlo.select(infinite, at_infinity, hlo.log1p(hlo.exp(small - large)) + large)
    return hlo.select(hlo.is_nan(x) | hlo.is_nan(y), complex(math.nan, math.nan), result)


@elementwise("logaddexp2")
def logaddexp2(x: Array, y: Array) -> Array:
    return _log_add_exp(x, y, exp2, lambda t: hlo.log1p(t) * (1 / math.log(2)))


@elementwise("sinc")
def sinc(x: Array) -> Array:
    """sin(πx)/(πx), 1 at 0."""
    scaled = x * math.pi
    return hlo.select(x.eq(0), 1, hlo.sin(scaled) / scaled)
