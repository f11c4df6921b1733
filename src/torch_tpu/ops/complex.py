"""Complex numbers made from and taken into parts, as fresh tensors (the parts as views are metadata)."""

from __future__ import annotations

import math

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.promotion import compute_dtype
from torch_tpu.ops.registry import Spec, lower

lower("conj_physical", "_conj_physical")(hlo.conj)


@lower("complex")
def complex_(re: Array, im: Array) -> Array:
    return hlo.complex_(re, im)


@lower("polar")
def polar(modulus: Array, angle: Array) -> Array:
    return hlo.complex_(modulus * hlo.cos(angle), modulus * hlo.sin(angle))


@lower("angle")
def angle(x: Array, out: Spec) -> Array:
    """Of a real number: 0, π for negative ones, NaN for NaN."""
    if x.dtype.is_complex:
        return hlo.atan2(hlo.imag(x), hlo.real(x))
    x = hlo.convert(x, compute_dtype(out.dtype))
    return hlo.select(hlo.is_nan(x), x, hlo.select(x < 0, math.pi, hlo.full_like(x, 0.0)))
