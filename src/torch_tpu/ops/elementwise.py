"""Arithmetic, comparison, logic and selection of one, two or three tensors, element by element; copies."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured, types
from torch_tpu.hlo.array import Array, ArrayLike, Number
from torch_tpu.ops.core.promotion import cast, compute_dtype, elementwise
from torch_tpu.ops.core.registry import Check, Spec, lower

# --- arithmetic --------------------------------------------------------------------------------------------------


@elementwise("add.Tensor", "add.Scalar")
def add(x: Array, y: ArrayLike, alpha: ArrayLike = 1) -> Array:
    return hlo.add(x, _scaled(y, alpha, x))


@lower("sub.Tensor", "sub.Scalar")
def sub(x: Array, y: ArrayLike, alpha: ArrayLike = 1, *, out: Spec) -> Array:
    if any(v.dtype is torch.bool if isinstance(v, Array) else isinstance(v, bool) for v in (x, y)):
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported.")
    x, y, alpha = (cast(v, compute_dtype(out.dtype)) for v in (x, y, alpha))
    return hlo.subtract(x, _scaled(y, alpha, x))


@lower("rsub.Tensor", "rsub.Scalar")
def rsub(x: Array, y: ArrayLike, alpha: ArrayLike = 1, *, out: Spec) -> Array:
    first = y if isinstance(y, Array) else hlo.constant(y, compute_dtype(out.dtype))
    return sub(first, x, alpha, out=out)


def _scaled(y: ArrayLike, alpha: ArrayLike, like: Array) -> ArrayLike:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return y
    return hlo.multiply(y if isinstance(y, Array) else hlo.constant(y, like.dtype), alpha)


@elementwise("mul.Tensor", "mul.Scalar")
def mul(x: Array, y: ArrayLike) -> Array:
    return x * y


@elementwise("div.Tensor", "div.Scalar")
def div(x: Array, y: ArrayLike) -> Array:
    return x / y


@elementwise("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Array, y: ArrayLike, *, rounding_mode: str | None, out: Spec, check: Check) -> Array:
    match rounding_mode:
        case "floor":
            return _floor_divide(x, y, check)
        case "trunc" if x.dtype.is_floating_point:
            return truncate(_rounded_quotient(x, y, out.dtype))
        case "trunc":
            _require_nonzero(y, x, check)
    return x / y


# Exponent and mantissa bits.
_REDUCED = {torch.float16: (5, 10), torch.bfloat16: (8, 7)}


def _rounded_quotient(x: Array, y: ArrayLike, dtype: torch.dtype) -> Array:
    """The CPU divides tensors of reduced precision in that precision, but by a number in float32."""
    if isinstance(y, Array) and y.ndim and dtype in _REDUCED:
        return hlo.reduce_precision(x / y, *_REDUCED[dtype])
    return x / y


@elementwise("floor_divide", "floor_divide.Scalar")
def floor_divide(x: Array, y: ArrayLike, *, check: Check) -> Array:
    return _floor_divide(x, y, check)


def _floor_divide(x: Array, y: ArrayLike, check: Check) -> Array:
    """Integers round towards -∞; floats as CPython's `float.__floordiv__`, from the exact remainder."""
    y = _like(y, x)
    if not x.dtype.is_floating_point:
        _require_nonzero(y, x, check)
        quotient = x / y
        return quotient - (_differs_in_sign(hlo.remainder(x, y), y)).astype(x.dtype)
    rest = hlo.remainder(x, y)
    quotient = (x - rest) / y
    quotient = hlo.select(_differs_in_sign(rest, y), quotient - 1, quotient)
    rounded = hlo.floor(quotient)
    rounded = hlo.select(quotient - rounded > 0.5, rounded + 1, rounded)
    plain = x / y
    rounded = hlo.select(quotient.ne(0), rounded, hlo.select(sign_bit(plain), -0.0, hlo.full_like(plain, 0.0)))
    return hlo.select(y.eq(0), plain, rounded)


@elementwise("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(x: ArrayLike, y: ArrayLike, *, out: Spec, check: Check) -> Array:
    """The result has the divisor's sign."""
    x, y = (_as_in(out.dtype, a) for a in _arrays(x, y))
    _require_nonzero(y, x, check)
    rest = hlo.remainder(x, y)
    return hlo.select(_differs_in_sign(rest, y), rest + y, rest)


@elementwise("fmod.Tensor", "fmod.Scalar")
def fmod(x: Array, y: ArrayLike, *, out: Spec, check: Check) -> Array:
    """The result has the dividend's sign."""
    _require_nonzero(y, x, check)
    return hlo.remainder(x, _as_in(out.dtype, _like(y, x)))


def _as_in(dtype: torch.dtype, x: Array) -> Array:
    """Rounded to a dtype of reduced precision: remainders, unlike quotients, take numbers so."""
    return hlo.reduce_precision(x, *_REDUCED[dtype]) if dtype in _REDUCED else x


def _differs_in_sign(rest: Array, divisor: Array) -> Array:
    return rest.ne(0) & (rest < 0).ne(divisor < 0)


def _require_nonzero(divisor: ArrayLike, like: Array, check: Check) -> None:
    divisor = _like(divisor, like)
    if not like.dtype.is_floating_point and 0 not in hlo.broadcast_shapes(divisor.shape, like.shape):
        flags = divisor.ne(0)
        check(structured.reduce_and(flags, range(flags.ndim)), "ZeroDivisionError", RuntimeError)


def _like(y: ArrayLike, x: Array) -> Array:
    return y if isinstance(y, Array) else hlo.constant(y, x.dtype)


def _arrays(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    if isinstance(x, Array):
        return x, _like(y, x)
    assert isinstance(y, Array)
    return _like(x, y), y


@elementwise("neg")
def neg(x: Array) -> Array:
    return -x


@elementwise("addcmul")
def addcmul(x: Array, a: Array, b: Array, *, value: ArrayLike) -> Array:
    return x + _scaled(a, value, x) * b


@elementwise("addcdiv")
def addcdiv(x: Array, a: Array, b: Array, *, value: ArrayLike) -> Array:
    return x + _scaled(a, value, x) / b


@elementwise("lerp.Scalar", "lerp.Tensor")
def lerp(start: Array, end: Array, weight: ArrayLike) -> Array:
    """From whichever end is nearer, so that weight 1 gives `end` exactly."""
    weight = _like(weight, start)
    return hlo.select(hlo.abs_(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


# --- powers ------------------------------------------------------------------------------------------------------

# Exponents for which PyTorch's CPU kernel multiplies instead of calling pow().
_UNROLLED = (0, 1, 2, 3, 0.5, -0.5, -1, -2)


def _is_structure(exponent: Number) -> bool:
    """Whether an exponent is part of the program: the cheap ones, and negative integers, which PyTorch may refuse."""
    return not isinstance(exponent, complex) and (exponent in _UNROLLED or (isinstance(exponent, int) and exponent < 0))


@elementwise("pow.Tensor_Scalar", static={"exponent": _is_structure})
def pow_tensor_scalar(x: Array, exponent: ArrayLike) -> Array:
    if not isinstance(exponent, Array) and _is_structure(exponent):
        if isinstance(exponent, (int, float)) and exponent < 0 and types.is_integer(x.dtype):
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return _unrolled_power(x, exponent)
    return _power(x, _like(exponent, x))


def _unrolled_power(x: Array, exponent: Number) -> Array:
    match exponent:
        case 0:
            return hlo.full_like(x, 1)
        case 1:
            return x
        case 2:
            return x * x
        case 3:
            return x * x * x
        case 0.5:
            return hlo.sqrt(x)
        case -0.5 if not x.dtype.is_complex:
            return 1 / hlo.sqrt(x)
        case -1:
            return 1 / x
        case -2:
            return 1 / (x * x)
    return _power(x, _like(exponent, x))


@elementwise("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor_tensor(x: ArrayLike, exponent: Array) -> Array:
    return _power(*_arrays(x, exponent))


def _power(x: Array, y: Array) -> Array:
    if x.dtype is torch.bool:
        return x | ~y
    if x.dtype.is_complex:
        return _complex_power(x, y)
    return hlo.power(x, y)


def _complex_power(x: Array, y: Array) -> Array:
    """exp(y log x), and C++'s values where log x is infinite: 0 to a power with positive real part is 0, x⁰ is 1."""
    result = hlo.select(x.eq(0) & (hlo.real(y) > 0), 0, hlo.power(x, y))
    return hlo.select(y.eq(0), 1, result)


# --- comparison --------------------------------------------------------------------------------------------------


@elementwise("eq.Tensor", "eq.Scalar", by="common")
def eq(x: Array, y: ArrayLike) -> Array:
    return x.eq(y)


@elementwise("ne.Tensor", "ne.Scalar", by="common")
def ne(x: Array, y: ArrayLike) -> Array:
    return x.ne(y)


@elementwise("lt.Tensor", "lt.Scalar", by="common")
def lt(x: Array, y: ArrayLike) -> Array:
    return x < y


@elementwise("le.Tensor", "le.Scalar", by="common")
def le(x: Array, y: ArrayLike) -> Array:
    return x <= y


@elementwise("gt.Tensor", "gt.Scalar", by="common")
def gt(x: Array, y: ArrayLike) -> Array:
    return x > y


@elementwise("ge.Tensor", "ge.Scalar", by="common")
def ge(x: Array, y: ArrayLike) -> Array:
    return x >= y


@elementwise("maximum")
def maximum(x: Array, y: Array) -> Array:
    return hlo.maximum(x, y)


@elementwise("minimum")
def minimum(x: Array, y: Array) -> Array:
    return hlo.minimum(x, y)


@elementwise("fmax")
def fmax(x: Array, y: Array) -> Array:
    """A NaN loses against a number."""
    return hlo.select(hlo.is_nan(x), y, hlo.select(hlo.is_nan(y), x, hlo.maximum(x, y)))


@elementwise("fmin")
def fmin(x: Array, y: Array) -> Array:
    """A NaN loses against a number."""
    return hlo.select(hlo.is_nan(x), y, hlo.select(hlo.is_nan(y), x, hlo.minimum(x, y)))


@elementwise("clamp", "clamp.Tensor")
def clamp(x: Array, low: ArrayLike | None = None, high: ArrayLike | None = None) -> Array:
    """The upper bound wins where they cross; a NaN in any operand is the result."""
    if low is not None:
        x = hlo.maximum(x, low)
    return x if high is None else hlo.minimum(x, high)


@elementwise("clamp_min", "clamp_min.Tensor")
def clamp_min(x: Array, low: ArrayLike) -> Array:
    return hlo.maximum(x, low)


@elementwise("clamp_max", "clamp_max.Tensor")
def clamp_max(x: Array, high: ArrayLike) -> Array:
    return hlo.minimum(x, high)


@elementwise("relu")
def relu(x: Array) -> Array:
    return hlo.maximum(x, 0)


# --- logic -------------------------------------------------------------------------------------------------------


def _truth(x: Array) -> Array:
    return hlo.convert(x, torch.bool)


@lower("logical_and")
def logical_and(x: Array, y: Array) -> Array:
    return _truth(x) & _truth(y)


@lower("logical_or")
def logical_or(x: Array, y: Array) -> Array:
    return _truth(x) | _truth(y)


@lower("logical_xor")
def logical_xor(x: Array, y: Array) -> Array:
    return _truth(x) ^ _truth(y)


@lower("logical_not")
def logical_not(x: Array) -> Array:
    return ~_truth(x)


@lower("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(condition: Array, x: ArrayLike, y: ArrayLike, out: Spec) -> Array:
    return hlo.select(condition, hlo.as_array(x, out.dtype), hlo.as_array(y, out.dtype))


# --- shared ------------------------------------------------------------------------------------------------------

_BITS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def sign_bit(x: Array) -> Array:
    """Whether the sign bit is set, that of -0.0 and of NaNs included."""
    if types.is_float(x.dtype):
        return hlo.bitcast(x, _BITS[8 * x.dtype.itemsize]) < 0
    return x < 0 if x.dtype.is_signed else hlo.full_like(x, 0).ne(0)


def truncate(x: Array) -> Array:
    """Towards zero; -0.5 gives -0.0."""
    return hlo.select(sign_bit(x), hlo.ceil(x), hlo.floor(x))


# --- copies ------------------------------------------------------------------------------------------------------


@lower("clone", "_to_copy")
def clone(x: Array, *, memory_format: torch.memory_format | None = None, **conversion: object) -> Array:
    """The conversion to the result's dtype is what every result gets."""
    return x


@lower("copy")
def copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return hlo.broadcast_to(hlo.convert(source, x.dtype), x.shape)
