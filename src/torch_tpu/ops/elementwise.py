"""Arithmetic, comparison and logic of one, two or three tensors, element by element."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array, Number
from torch_tpu.ops.promotion import elementwise
from torch_tpu.ops.registry import lower

# --- arithmetic --------------------------------------------------------------------------------------------------


@elementwise("add.Tensor", "add.Scalar")
def add(x: Array, y: Array | Number, alpha: Array | Number = 1) -> Array:
    return hlo.add(x, _scaled(y, alpha))


@elementwise("sub.Tensor", "sub.Scalar")
def sub(x: Array, y: Array | Number, alpha: Array | Number = 1) -> Array:
    return hlo.subtract(x, _scaled(y, alpha))


def _scaled(y: Array | Number, alpha: Array | Number) -> Array | Number:
    return y if isinstance(alpha, (int, float)) and alpha == 1 else hlo.multiply(y, alpha)


@elementwise("mul.Tensor", "mul.Scalar")
def mul(x: Array, y: Array) -> Array:
    return x * y


@elementwise("div.Tensor", "div.Scalar")
def div(x: Array, y: Array) -> Array:
    return x / y


@elementwise("neg")
def neg(x: Array) -> Array:
    return -x


@elementwise("exp")
def exp(x: Array) -> Array:
    return hlo.exp(x)


@elementwise("tanh")
def tanh(x: Array) -> Array:
    return hlo.tanh(x)


@elementwise("relu")
def relu(x: Array) -> Array:
    return hlo.maximum(x, 0)


# --- comparison --------------------------------------------------------------------------------------------------


@elementwise("eq.Tensor", "eq.Scalar", by="common")
def eq(x: Array, y: Array) -> Array:
    return x.eq(y)


@elementwise("gt.Tensor", "gt.Scalar", by="common")
def gt(x: Array, y: Array) -> Array:
    return x > y


# --- copies ------------------------------------------------------------------------------------------------------


@lower("clone", "_to_copy")
def clone(x: Array, *, memory_format: torch.memory_format | None = None, **conversion: object) -> Array:
    """The conversion to the result's dtype is what every result gets."""
    return x


@lower("copy")
def copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return hlo.broadcast_to(hlo.convert(source, x.dtype), x.shape)
