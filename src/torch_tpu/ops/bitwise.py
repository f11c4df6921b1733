"""Bitwise logic and shifts of integers and booleans; the exclusive or of all elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import elementwise
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.reduction import reduced_dimensions


@elementwise("bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor")
def bitwise_and(x: ArrayLike, y: ArrayLike) -> Array:
    return hlo.and_(x, y)


@elementwise("bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_or.Scalar_Tensor")
def bitwise_or(x: ArrayLike, y: ArrayLike) -> Array:
    return hlo.or_(x, y)


@elementwise("bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor")
def bitwise_xor(x: ArrayLike, y: ArrayLike) -> Array:
    return hlo.xor(x, y)


@elementwise("bitwise_not")
def bitwise_not(x: Array) -> Array:
    return ~x


@elementwise(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
)
def left_shift(x: ArrayLike, y: ArrayLike) -> Array:
    """By a negative amount or at least the width: 0, as StableHLO defines it too."""
    return hlo.shift_left(x, y)


@elementwise(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
)
def right_shift(x: ArrayLike, y: ArrayLike) -> Array:
    """Keeps the sign; by a negative amount or at least the width: all sign bits, as StableHLO defines it too."""
    like = x if isinstance(x, Array) else y
    assert isinstance(like, Array)
    return hlo.shift_right_arithmetic(x, y) if like.dtype.is_signed else hlo.shift_right_logical(x, y)


@lower("hash_tensor")
def hash_tensor(x: Array, dim: Sequence[int] = (), *, keepdim: bool, mode: int, out: Spec) -> Array:
    """The exclusive or of all elements' bits, as 64-bit integers or floats."""
    if mode:
        raise RuntimeError(f"hash_tensor: mode {mode} is unknown")
    wide = hlo.convert(x, torch.float64 if x.dtype.is_floating_point else torch.int64)
    bits = hlo.bitcast(wide, torch.uint64)
    return hlo.reshape(structured.reduce_one(bits, 0, reduced_dimensions(x, list(dim)), hlo.xor), out.shape)
