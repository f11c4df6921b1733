"""Complex numbers made from and taken into parts, as fresh tensors (the parts as views are metadata)."""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, lower

lower("conj_physical", "_conj_physical")(hlo.conj)


@lower("complex")
def complex_(re: Array, im: Array) -> Array:
    return hlo.complex_(re, im)


@lower("polar")
def polar(modulus: Array, angle: Array) -> Array:
    return hlo.complex_(modulus * hlo.cos(angle), modulus * hlo.sin(angle))


def modulus(x: Array) -> Array:
    """|x|, as a real number; x may be real.

    XLA:CPU gives the last digit differently in different programs. That of a complex64 number is rounded from double
    precision: the gradient of a largest |x|, which compares it with each |x| again, would otherwise find none.
    """
    if x.dtype is torch.complex64 and module.target().platform == "cpu":
        return hlo.convert(hlo.abs_(hlo.convert(x, torch.complex128)), torch.float32)
    return hlo.abs_(x)


lower("abs")(modulus)


@lower("angle")
def angle(x: Array, out: Spec) -> Array:
    """Of a real number: 0, π for negative ones, NaN for NaN."""
    if x.dtype.is_complex:
        return hlo.atan2(hlo.imag(x), hlo.real(x))
    x = hlo.convert(x, compute_dtype(out.dtype))
    return hlo.select(hlo.is_nan(x), x, hlo.select(x < 0, math.pi, hlo.full_like(x, 0.0)))
