"""Rounding, signs, classification and the integer structure of numbers."""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured, types
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype, elementwise
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.elementwise import sign_bit, truncate

# --- rounding ----------------------------------------------------------------------------------------------------


def _is_whole(x: Array) -> bool:
    return types.is_integer(x.dtype) or x.dtype is torch.bool


@elementwise("floor")
def floor(x: Array) -> Array:
    return x if _is_whole(x) else hlo.floor(x)


@elementwise("ceil")
def ceil(x: Array) -> Array:
    return x if _is_whole(x) else hlo.ceil(x)


@elementwise("trunc")
def trunc(x: Array) -> Array:
    return x if _is_whole(x) else truncate(x)


@elementwise("round")
def round_(x: Array) -> Array:
    """Halves go to the even neighbour."""
    return x if _is_whole(x) else hlo.round_nearest_even(x)


@elementwise("round.decimals")
def round_decimals(x: Array, *, decimals: int) -> Array:
    if _is_whole(x):
        return x
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return hlo.round_nearest_even(x / scale) * scale
    return hlo.round_nearest_even(x * scale) / scale


@elementwise("frac")
def frac(x: Array) -> Array:
    return x - truncate(x)


# --- signs -------------------------------------------------------------------------------------------------------


@elementwise("sign")
def sign(x: Array) -> Array:
    """0 for NaN, as on the CPU."""
    if not _is_whole(x):
        return hlo.convert(x > 0, x.dtype) - hlo.convert(x < 0, x.dtype)
    return hlo.sign(x) if x.dtype.is_signed else hlo.convert(x.ne(0), x.dtype)


@elementwise("sgn")
def sgn(x: Array) -> Array:
    """The sign; of a complex number z, z/|z|, or 0 where z is 0."""
    if not x.dtype.is_complex:
        return sign(x)
    modulus = hlo.abs_(x)
    return hlo.select(modulus.eq(0), 0, x / hlo.complex_(modulus, hlo.full_like(modulus, 0)))


@lower("signbit")
def signbit(x: Array) -> Array:
    return sign_bit(x)


@elementwise("copysign.Tensor", "copysign.Scalar")
def copysign(x: Array, y: ArrayLike) -> Array:
    y = y if isinstance(y, Array) else hlo.constant(y, x.dtype)
    return hlo.select(sign_bit(x).ne(sign_bit(y)), -x, x)


@elementwise("heaviside")
def heaviside(x: Array, at_zero: Array) -> Array:
    """0 for NaN, as on the CPU."""
    return hlo.select(x.eq(0), at_zero, hlo.convert(x > 0, at_zero.dtype))


# --- classification ----------------------------------------------------------------------------------------------


def _is_infinite(x: Array) -> Array:
    if x.dtype.is_complex:
        return _is_infinite(hlo.real(x)) | _is_infinite(hlo.imag(x))
    return _is_positive_infinite(x) | _is_negative_infinite(x)


def _is_positive_infinite(x: Array) -> Array:
    return x.eq(math.inf) if types.is_float(x.dtype) else hlo.constant(False, torch.bool, x.shape)


def _is_negative_infinite(x: Array) -> Array:
    return x.eq(-math.inf) if types.is_float(x.dtype) else hlo.constant(False, torch.bool, x.shape)


lower("isnan")(hlo.is_nan)
lower("isinf")(_is_infinite)
lower("isposinf")(_is_positive_infinite)
lower("isneginf")(_is_negative_infinite)


@lower("nan_to_num")
def nan_to_num(
    x: Array,
    nan: ArrayLike | None = None,
    posinf: ArrayLike | None = None,
    neginf: ArrayLike | None = None,
) -> Array:
    """Infinities become the dtype's largest and lowest finite numbers unless told otherwise."""
    if x.dtype.is_complex:
        return hlo.complex_(*(nan_to_num(part, nan, posinf, neginf) for part in (hlo.real(x), hlo.imag(x))))
    if not types.is_float(x.dtype):
        return x

    def replaced(x: Array, where: Array, value: ArrayLike) -> Array:
        return hlo.select(where, hlo.convert(value, x.dtype) if isinstance(value, Array) else value, x)

    limits = torch.finfo(x.dtype)
    result = replaced(x, hlo.is_nan(x), 0.0 if nan is None else nan)
    result = replaced(result, x.eq(math.inf), limits.max if posinf is None else posinf)
    return replaced(result, x.eq(-math.inf), limits.min if neginf is None else neginf)


# --- the structure of numbers ------------------------------------------------------------------------------------


@lower("nextafter")
def nextafter(x: Array, y: Array, out: Spec) -> Array:
    return hlo.next_after(hlo.convert(x, out.dtype), hlo.convert(y, out.dtype))


# Explicit mantissa bits and exponent bias of the formats frexp takes apart.
_FORMATS = {torch.float32: (23, 127, torch.int32), torch.float64: (52, 1023, torch.int64)}


@lower("frexp.Tensor")
def frexp(x: Array) -> tuple[Array, Array]:
    """x = mantissa · 2^exponent with ½ ≤ |mantissa| < 1; zeros, infinities and NaNs have exponent 0."""
    x = hlo.convert(x, compute_dtype(x.dtype))
    mantissa_bits, bias, integer = _FORMATS[x.dtype]
    bits = hlo.bitcast(x, integer)
    field = (2 * bias + 1) << mantissa_bits
    exponent = hlo.shift_right_logical(bits & field, mantissa_bits) - (bias - 1)
    mantissa = hlo.bitcast((bits & ~field) | ((bias - 1) << mantissa_bits), x.dtype)
    is_special = x.eq(0) | ~hlo.is_finite(x)
    return hlo.select(is_special, x, mantissa), hlo.select(is_special, 0, exponent)


@lower("ldexp.Tensor")
def ldexp(x: Array, exponent: Array, *, out: Spec) -> Array:
    """x · 2^exponent. For floats and whole exponents it is exact, though 2^exponent alone may be out of range."""
    wide = compute_dtype(out.dtype)
    if not (types.is_float(x.dtype) and types.is_integer(exponent.dtype)):
        factor = exponent.dtype if types.is_float(exponent.dtype) else torch.get_default_dtype()
        power = hlo.power(hlo.constant(2, compute_dtype(factor)), hlo.convert(exponent, compute_dtype(factor)))
        return hlo.convert(hlo.convert(x, out.dtype), wide) * hlo.convert(hlo.convert(power, factor), wide)
    mantissa_bits, bias, integer = _FORMATS[wide]
    x, left = hlo.convert(x, wide), hlo.convert(exponent, torch.int64)
    left = hlo.convert(hlo.clamp(-(2**30), left, 2**30), integer)
    # From the smallest number to the largest it takes two powers and a bit.
    for _ in range(3):
        part = hlo.clamp(1 - bias, left, bias)
        x = x * hlo.bitcast(hlo.shift_left(part + bias, mantissa_bits), wide)
        left = left - part
    return x


@elementwise("gcd")
def gcd(x: Array, y: Array) -> Array:
    """Euclid's algorithm, until every element has ended."""
    shape = hlo.broadcast_shapes(x.shape, y.shape)

    def unfinished(a: Array, b: Array) -> Array:
        return structured.reduce_or(b.ne(0), range(b.ndim))

    def step(a: Array, b: Array) -> tuple[Array, Array]:
        is_done = b.eq(0)
        return hlo.select(is_done, a, b), hlo.select(is_done, 0, hlo.remainder(a, hlo.select(is_done, 1, b)))

    operands = [hlo.abs_(hlo.broadcast_to(v, shape)) for v in (x, y)]
    return structured.while_loop(operands, unfinished, step)[0]


@elementwise("lcm")
def lcm(x: Array, y: Array) -> Array:
    divisor = gcd(x, y)
    quotient = x / hlo.select(divisor.eq(0), 1, divisor)
    if x.dtype.itemsize < 4:
        # C++ multiplies small integers as int, and cuts off after taking the absolute value.
        quotient, y = hlo.convert(quotient, torch.int32), hlo.convert(y, torch.int32)
    return hlo.abs_(quotient * y)
