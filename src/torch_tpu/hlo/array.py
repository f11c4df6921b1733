"""`Array`, a value of a StableHLO program under construction, with operators; elementwise and shape operations.

Binary operations broadcast as NumPy does and want equal dtypes: promotion is the caller's decision
(`ops.core.promotion`). A Python number beside an Array becomes a constant of the Array's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo

from torch_tpu.hlo import types
from torch_tpu.hlo.target import target

Number = bool | int | float | complex


class Array:
    """A tensor-typed SSA value: `value` in MLIR, `shape`, and torch `dtype`."""

    __slots__ = ("dtype", "shape", "value")

    def __init__(self, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.value = value
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def astype(self, dtype: torch.dtype) -> Array:
        return convert(self, dtype)

    def reshape(self, *shape: int) -> Array:
        return reshape(self, shape)

    def transpose(self, *permutation: int) -> Array:
        return transpose(self, permutation)

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {list(self.shape)})"

    def __add__(self, other: ArrayLike) -> Array:
        return add(self, other)

    def __radd__(self, other: Number) -> Array:
        return add(other, self)

    def __sub__(self, other: ArrayLike) -> Array:
        return subtract(self, other)

    def __rsub__(self, other: Number) -> Array:
        return subtract(other, self)

    def __mul__(self, other: ArrayLike) -> Array:
        return multiply(self, other)

    def __rmul__(self, other: Number) -> Array:
        return multiply(other, self)

    def __truediv__(self, other: ArrayLike) -> Array:
        return divide(self, other)

    def __rtruediv__(self, other: Number) -> Array:
        return divide(other, self)

    def __neg__(self) -> Array:
        return negate(self)

    def __and__(self, other: ArrayLike) -> Array:
        return and_(self, other)

    def __or__(self, other: ArrayLike) -> Array:
        return or_(self, other)

    def __xor__(self, other: ArrayLike) -> Array:
        return xor(self, other)

    def __invert__(self) -> Array:
        return not_(self)

    def __lt__(self, other: ArrayLike) -> Array:
        return compare(self, other, "LT")

    def __le__(self, other: ArrayLike) -> Array:
        return compare(self, other, "LE")

    def __gt__(self, other: ArrayLike) -> Array:
        return compare(self, other, "GT")

    def __ge__(self, other: ArrayLike) -> Array:
        return compare(self, other, "GE")

    def eq(self, other: ArrayLike) -> Array:
        return compare(self, other, "EQ")

    def ne(self, other: ArrayLike) -> Array:
        return compare(self, other, "NE")


ArrayLike = Array | Number


def _result_of(value: Any, like: Array) -> Array:
    return Array(value, like.shape, like.dtype)


# --- constants ---------------------------------------------------------------------------------------------------


def constant(value: Number | npt.ArrayLike, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Array:
    """A constant. A number given with `shape` is broadcast to it; an array keeps its own shape."""
    array = np.asarray(value)
    numpy_dtype = types.numpy_dtype(dtype)
    if array.dtype.kind in "iu" and numpy_dtype.kind in "iu":
        # An out-of-range number wraps, as PyTorch's casts do.
        array = np.asarray(array.astype(np.int64) if array.dtype.kind == "i" else array).astype(numpy_dtype)
    elif array.dtype.kind == "c" and numpy_dtype.kind != "c":
        array = array.real.astype(numpy_dtype)
    else:
        with np.errstate(all="ignore"):
            array = array.astype(numpy_dtype)
    element_type = types.element_type(dtype)
    raw: Any = np.ascontiguousarray(array)
    if numpy_dtype.isbuiltin != 1:
        raw = raw.view(f"u{numpy_dtype.itemsize}")
    attribute = ir.DenseElementsAttr.get(raw, type=element_type, shape=list(array.shape))
    result = Array(stablehlo.constant(attribute), array.shape, dtype)
    return result if shape is None else broadcast_to(result, shape)


def known_number(x: Array) -> Number | None:
    """The number that all elements of a constant are; None for anything else."""
    operation = x.value.owner
    # MLIR's Python bindings can't read complex constants.
    if isinstance(operation, ir.Block) or operation.name != "stablehlo.constant" or x.dtype.is_complex:
        return None
    elements = ir.DenseElementsAttr(operation.attributes["value"])
    if not elements.is_splat:
        return None
    splat: Any = elements.get_splat_value()
    number: Number = splat.value
    return number


def as_array(value: ArrayLike, dtype: torch.dtype) -> Array:
    """An Array converted to `dtype`; a number as a 0-d constant."""
    return convert(value, dtype) if isinstance(value, Array) else constant(value, dtype)


def full(shape: Sequence[int], value: Number, dtype: torch.dtype) -> Array:
    return constant(value, dtype, shape)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Array:
    return constant(0, dtype, shape)


def full_like(x: Array, value: Number) -> Array:
    return constant(value, x.dtype, x.shape)


def iota(shape: Sequence[int], dimension: int, dtype: torch.dtype = torch.int32) -> Array:
    """Each element is its own index along `dimension`."""
    if dtype is torch.bool:
        return iota(shape, dimension, torch.int32).ne(0)
    return Array(stablehlo.iota(types.tensor_type(tuple(shape), dtype), dimension), shape, dtype)


def lowest(dtype: torch.dtype) -> Number:
    """The value that every other value of `dtype` is at least."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """The value that every other value of `dtype` is at most."""
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


# --- shape -------------------------------------------------------------------------------------------------------


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """The same elements in row-major order with another shape; one entry may be -1."""
    shape = tuple(shape)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape = tuple(x.size // known if size == -1 else size for size in shape)
    if shape == x.shape:
        return x
    return Array(stablehlo.reshape(types.tensor_type(shape, x.dtype), x.value), shape, x.dtype)


def transpose(x: Array, permutation: Sequence[int]) -> Array:
    if list(permutation) == list(range(x.ndim)):
        return x
    shape = [x.shape[d] for d in permutation]
    return Array(stablehlo.transpose(x.value, list(permutation)), shape, x.dtype)


def is_transposed(x: Array) -> bool:
    """Whether `x` is a transpose of something, which a product would read in place."""
    owner = x.value.owner
    return getattr(owner, "name", "") == "stablehlo.transpose"


def broadcast_in_dim(x: Array, shape: Sequence[int], dimensions: Sequence[int]) -> Array:
    """`x` spread to `shape`, its dimension i becoming `dimensions[i]`."""
    shape = tuple(shape)
    if shape == x.shape and list(dimensions) == list(range(x.ndim)):
        return x
    value = stablehlo.broadcast_in_dim(types.tensor_type(shape, x.dtype), x.value, list(dimensions))
    return Array(value, shape, x.dtype)


def broadcast_to(x: Array, shape: Sequence[int]) -> Array:
    """NumPy broadcasting: dimensions align at the right."""
    return broadcast_in_dim(x, shape, range(len(shape) - x.ndim, len(shape)))


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def expand_dims(x: Array, *dimensions: int) -> Array:
    """Size-1 dimensions inserted so that they stand at `dimensions` of the result."""
    ndim = x.ndim + len(dimensions)
    inserted = {d % ndim for d in dimensions}
    sizes = iter(x.shape)
    return reshape(x, [1 if d in inserted else next(sizes) for d in range(ndim)])


def squeeze(x: Array, *dimensions: int) -> Array:
    dropped = {d % x.ndim for d in dimensions}
    return reshape(x, [size for d, size in enumerate(x.shape) if d not in dropped])


def slice_(x: Array, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None = None) -> Array:
    strides = [1] * x.ndim if strides is None else list(strides)
    shape = [
        max(0, -(-(limit - start) // stride)) for start, limit, stride in zip(starts, limits, strides, strict=True)
    ]
    if tuple(shape) == x.shape:
        return x
    return Array(stablehlo.slice(x.value, list(starts), list(limits), strides), shape, x.dtype)


def slice_in_dim(x: Array, start: int, limit: int, stride: int = 1, dim: int = 0) -> Array:
    dim %= x.ndim
    starts, limits, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[dim], limits[dim], strides[dim] = start, limit, stride
    return slice_(x, starts, limits, strides)


def dynamic_slice(x: Array, starts: Sequence[Array], sizes: Sequence[int]) -> Array:
    """A block of `sizes` at `starts` (0-d integer Arrays, clamped so that the block fits)."""
    return Array(stablehlo.dynamic_slice(x.value, [s.value for s in starts], list(sizes)), sizes, x.dtype)


def dynamic_update_slice(x: Array, update: Array, starts: Sequence[Array]) -> Array:
    return _result_of(stablehlo.dynamic_update_slice(x.value, update.value, [s.value for s in starts]), x)


def concatenate(arrays: Sequence[Array], dim: int) -> Array:
    first = arrays[0]
    dim %= first.ndim
    if len(arrays) == 1:
        return first
    shape = list(first.shape)
    shape[dim] = sum(a.shape[dim] for a in arrays)
    return Array(stablehlo.concatenate([a.value for a in arrays], dim), shape, first.dtype)


def stack(arrays: Sequence[Array], dim: int) -> Array:
    return concatenate([expand_dims(a, dim) for a in arrays], dim)


def pad(
    x: Array,
    value: ArrayLike,
    low: Sequence[int],
    high: Sequence[int],
    interior: Sequence[int] | None = None,
) -> Array:
    """`x` with `low`/`high` elements of `value` at the edges (negative: cut) and `interior` between elements."""
    interior = [0] * x.ndim if interior is None else list(interior)
    if not any(low) and not any(high) and not any(interior):
        return x
    shape = [
        lo + size + max(size - 1, 0) * inner + hi
        for lo, size, inner, hi in zip(low, x.shape, interior, high, strict=True)
    ]
    fill = value if isinstance(value, Array) else constant(value, x.dtype)
    return Array(stablehlo.pad(x.value, fill.value, list(low), list(high), interior), shape, x.dtype)


def reverse(x: Array, dimensions: Sequence[int]) -> Array:
    return _result_of(stablehlo.reverse(x.value, list(dimensions)), x) if dimensions else x


# --- dtype -------------------------------------------------------------------------------------------------------


def convert(x: Array, dtype: torch.dtype) -> Array:
    """PyTorch's cast: to bool is `!= 0`, complex to real drops the imaginary part, float to integer truncates."""
    if x.dtype is dtype:
        return x
    if dtype is torch.bool:
        return x.ne(0)
    if x.dtype.is_complex and not dtype.is_complex:
        return convert(real(x), dtype)
    if x.dtype is torch.bool and (dtype.is_floating_point or dtype.is_complex):
        # As a conversion, XLA takes a product with it for a selection: false times infinity would be 0.
        return select(x, constant(1, dtype), constant(0, dtype))
    if x.dtype.is_floating_point and dtype in (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16):
        # Out of range, C++ goes through a wider integer and wraps where XLA would saturate.
        return convert(convert(x, torch.int64 if dtype is torch.uint32 else torch.int32), dtype)
    return Array(stablehlo.convert(types.tensor_type(x.shape, dtype), x.value), x.shape, dtype)


def bitcast(x: Array, dtype: torch.dtype) -> Array:
    """The bits of `x` read as `dtype`. A narrower dtype adds a last dimension, a wider one takes it away."""
    ratio = x.dtype.itemsize / dtype.itemsize
    shape = x.shape if ratio == 1 else (*x.shape, int(ratio)) if ratio > 1 else x.shape[:-1]
    return Array(stablehlo.bitcast_convert(types.tensor_type(shape, dtype), x.value), shape, dtype)


def real(x: Array) -> Array:
    return Array(stablehlo.real(x.value), x.shape, types.REAL_PART[x.dtype]) if x.dtype.is_complex else x


def imag(x: Array) -> Array:
    if not x.dtype.is_complex:
        return full_like(x, 0)
    return Array(stablehlo.imag(x.value), x.shape, types.REAL_PART[x.dtype])


def complex_(re: ArrayLike, im: ArrayLike) -> Array:
    re, im = _pair(re, im)
    dtype = types.complex_of(re.dtype)
    return Array(stablehlo.complex(re.value, im.value), re.shape, dtype)


def conj(x: Array) -> Array:
    return complex_(real(x), -imag(x)) if x.dtype.is_complex else x


# --- elementwise: two operands -----------------------------------------------------------------------------------


def _pair(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    if not isinstance(x, Array):
        assert isinstance(y, Array), "one operand must be an Array"
        return constant(x, y.dtype, y.shape), y
    if not isinstance(y, Array):
        return x, constant(y, x.dtype, x.shape)
    if x.dtype is not y.dtype:
        raise TypeError(f"operands differ in dtype: {x} and {y}")
    if x.shape != y.shape:
        shape = broadcast_shapes(x.shape, y.shape)
        return broadcast_to(x, shape), broadcast_to(y, shape)
    return x, y


def _require_real(name: str, x: Array) -> None:
    """XLA takes complex numbers for some of these, and ends the process when it compiles them."""
    if x.dtype.is_complex:
        raise TypeError(f"{name} is not defined for complex numbers")


def _binary(name: str, *, real: bool = False) -> Callable[[ArrayLike, ArrayLike], Array]:
    build = getattr(stablehlo, name)

    def operation(x: ArrayLike, y: ArrayLike) -> Array:
        x, y = _pair(x, y)
        if real:
            _require_real(name, x)
        return _result_of(build(x.value, y.value), x)

    operation.__name__ = name
    return operation


add = _binary("add")
subtract = _binary("subtract")
multiply = _binary("multiply")
remainder = _binary("remainder", real=True)
maximum = _binary("maximum", real=True)
minimum = _binary("minimum", real=True)
power = _binary("power")
atan2 = _binary("atan2", real=True)
and_ = _binary("and_")
or_ = _binary("or_")
xor = _binary("xor")
shift_left = _binary("shift_left")
shift_right_arithmetic = _binary("shift_right_arithmetic")
shift_right_logical = _binary("shift_right_logical")


def divide(x: ArrayLike, y: ArrayLike) -> Array:
    """x / y. Quotients of real numbers are rounded correctly on XLA:CPU; on a TPU they are what the chip gives."""
    inverse = _exact_inverse(y)
    if inverse is not None and isinstance(x, Array) and _is_inexact(x.dtype) and target().platform == "cpu":
        return multiply(x, as_array(inverse, x.dtype))
    x, y = _hidden(*_pair(x, y))
    return _result_of(stablehlo.divide(x.value, y.value), x)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _exact_inverse(x: ArrayLike) -> float | None:
    """1/x of a power of two, which XLA:CPU multiplies by more readily, as in the mean of 1,024 numbers."""
    number = known_number(x) if isinstance(x, Array) else x
    if not isinstance(number, (int, float)):
        return None
    mantissa, exponent = math.frexp(number)
    return 1 / number if abs(mantissa) == 0.5 and abs(exponent) < 100 else None


def _hidden(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as XLA:CPU's simplifier can't look behind them, if they are floats.

    It takes x/3 and x/column for products with a rounded reciprocal, (x/y)/z for x/(y·z) and x/√y for x·rsqrt(y), which
    is an approximation. Nothing remains of these barriers where operations are fused, so they cost nothing themselves.
    """
    if target().platform != "cpu" or not _is_inexact(arrays[0].dtype):
        return arrays
    values = stablehlo.OptimizationBarrierOp([a.value for a in arrays]).results
    return tuple(_result_of(value, a) for value, a in zip(values, arrays, strict=True))


def compare(x: ArrayLike, y: ArrayLike, direction: str) -> Array:
    """`direction` is EQ, NE, LT, LE, GT or GE. Floats compare as IEEE 754 says: NaN equals nothing."""
    x, y = _pair(x, y)
    if direction not in ("EQ", "NE"):
        _require_real("an order", x)
    attribute = stablehlo.ComparisonDirectionAttr.get(direction)
    return Array(stablehlo.compare(x.value, y.value, attribute), x.shape, torch.bool)


def next_after(x: Array, y: Array) -> Array:
    x, y = _pair(x, y)
    return _result_of(chlo.next_after(x.value, y.value), x)


def select(condition: Array, on_true: ArrayLike, on_false: ArrayLike) -> Array:
    on_true, on_false = _pair(on_true, on_false)
    shape = broadcast_shapes(condition.shape, on_true.shape)
    condition, on_true, on_false = (broadcast_to(a, shape) for a in (condition, on_true, on_false))
    return _result_of(stablehlo.select(condition.value, on_true.value, on_false.value), on_true)


def clamp(low: ArrayLike, x: Array, high: ArrayLike) -> Array:
    """`x` limited to [low, high]; NaN stays NaN."""
    return minimum(maximum(x, low), high)


# --- elementwise: one operand ------------------------------------------------------------------------------------


def _unary(name: str, dialect: Any = stablehlo, *, real: bool = False) -> Callable[[Array], Array]:
    build = getattr(dialect, name)

    def operation(x: Array) -> Array:
        if real:
            _require_real(name, x)
        return _result_of(build(x.value), x)

    operation.__name__ = name
    return operation


negate = _unary("negate")
not_ = _unary("not_")
count_leading_zeros = _unary("count_leading_zeros")
sign = _unary("sign")
floor = _unary("floor", real=True)
ceil = _unary("ceil", real=True)
round_nearest_even = _unary("round_nearest_even", real=True)
round_nearest_afz = _unary("round_nearest_afz", real=True)
exp = _unary("exponential")
expm1 = _unary("exponential_minus_one")
log = _unary("log")
log1p = _unary("log_plus_one")
logistic = _unary("logistic")
tanh = _unary("tanh")
sin = _unary("sine")
cos = _unary("cosine")
tan = _unary("tan")
acos = _unary("acos", chlo)
acosh = _unary("acosh", chlo)
asin = _unary("asin", chlo)
asinh = _unary("asinh", chlo)
atan = _unary("atan", chlo)
atanh = _unary("atanh", chlo)
sinh = _unary("sinh", chlo)
cosh = _unary("cosh", chlo)
erf = _unary("erf", chlo, real=True)
erfc = _unary("erfc", chlo, real=True)
erf_inv = _unary("erf_inv", chlo, real=True)
lgamma = _unary("lgamma", chlo, real=True)
digamma = _unary("digamma", chlo, real=True)
bessel_i1e = _unary("bessel_i1e", chlo, real=True)


_sqrt = _unary("sqrt")
_rsqrt = _unary("rsqrt")


def sqrt(x: Array) -> Array:
    """√x; of a real number it is rounded correctly on XLA:CPU, also in √x·√x, which the simplifier would replace."""
    if x.dtype.is_complex or target().platform != "cpu":
        return _sqrt(x)
    (x,) = _hidden(x)
    # YNN, where XLA leaves a sum to it, takes y/√x for y·rsqrt(x), which is no correct quotient, if nothing is between.
    zeros = ir.DenseElementsAttr.get_splat(x.value.type, ir.FloatAttr.get(types.element_type(x.dtype), -0.0))
    return add(*_hidden(_sqrt(x), _result_of(stablehlo.constant(zeros), x)))


def rsqrt(x: Array) -> Array:
    """1/√x. XLA:CPU has an approximation for that, so for real numbers it divides there, as PyTorch does on the CPU."""
    return _rsqrt(x) if x.dtype.is_complex or target().platform != "cpu" else 1 / sqrt(x)


def polygamma(n: Array, x: Array) -> Array:
    n, x = _pair(n, x)
    return _result_of(chlo.polygamma(n.value, x.value), x)


def zeta(x: Array, q: Array) -> Array:
    x, q = _pair(x, q)
    return _result_of(chlo.zeta(x.value, q.value), x)


def abs_(x: Array) -> Array:
    """|x|; of a complex Array, its modulus as a real one. Unsigned and bool are their own."""
    if x.dtype.is_complex:
        return Array(stablehlo.abs(x.value), x.shape, types.REAL_PART[x.dtype])
    if x.dtype is torch.bool or not x.dtype.is_signed:
        return x
    return _result_of(stablehlo.abs(x.value), x)


def is_finite(x: Array) -> Array:
    return Array(stablehlo.is_finite(x.value), x.shape, torch.bool)


def is_nan(x: Array) -> Array:
    if x.dtype.is_complex:
        return is_nan(real(x)) | is_nan(imag(x))
    return x.ne(x) if x.dtype.is_floating_point else constant(False, torch.bool, x.shape)


def square(x: Array) -> Array:
    return x * x


def reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    return _result_of(stablehlo.reduce_precision(x.value, exponent_bits, mantissa_bits), x)
