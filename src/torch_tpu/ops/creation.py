"""Tensors made from sizes and numbers."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array, Number
from torch_tpu.ops.registry import Spec, lower


@lower("full", "full_like", "new_full")
def full(*arguments: Any, out: Spec, **options: Any) -> Array:
    return _filled(arguments[-1], out)


@lower("zeros", "zeros_like", "new_zeros", "zero", "_efficientzerotensor")
def zeros(*arguments: Any, out: Spec, **options: Any) -> Array:
    return hlo.zeros(out.shape, out.dtype)


@lower("ones", "ones_like", "new_ones")
def ones(*arguments: Any, out: Spec, **options: Any) -> Array:
    return hlo.full(out.shape, 1, out.dtype)


@lower("fill.Scalar", "fill.Tensor")
def fill(x: Array, value: Array | Number) -> Array:
    return _filled(value, Spec(x.shape, x.dtype))


def _filled(value: Array | Number, out: Spec) -> Array:
    if isinstance(value, Array):
        return hlo.broadcast_to(hlo.convert(value, out.dtype), out.shape)
    return hlo.full(out.shape, value, out.dtype)


@lower("scalar_tensor")
def scalar_tensor(value: Array | Number, *, out: Spec, **options: Any) -> Array:
    return _filled(value, out)


@lower("eye", "eye.m")
def eye(n: int, *arguments: Any, out: Spec, **options: Any) -> Array:
    return hlo.convert(hlo.iota(out.shape, 0).eq(hlo.iota(out.shape, 1)), out.dtype)
