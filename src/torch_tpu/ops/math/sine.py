"""Sine and cosine of float32 numbers on XLA:CPU, which calls the C library for each element, eight times as slowly.

Cody and Waite's reduction to [-π/4, π/4] and Taylor polynomials, in float64, so that one rounding is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array

# π/2 as a number of 33 bits, whose products with quadrants below 2²⁰ are exact, and the rest.
_HALF_PI, _REST = 1.5707963267341256, 6.077100506506192e-11
_LIMIT = 2.0**20
# Below this many elements the longer compilation isn't worth it.
_FROM = 2**14
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]


def sin(x: Array) -> Array:
    return _in_float64(x, 0, hlo.sin) if _is_many(x) else hlo.sin(x)


def cos(x: Array) -> Array:
    return _in_float64(x, 1, hlo.cos) if _is_many(x) else hlo.cos(x)


def _is_many(x: Array) -> bool:
    return x.dtype is torch.float32 and x.size >= _FROM and module.target().platform == "cpu"


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    result = hlo.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


def _in_float64(x: Array, quarters: int, exact: Callable[[Array], Array]) -> Array:
    """sin(x + quarters · π/2); `exact` takes over for numbers that are too large, in a loop that else doesn't run."""
    wide = hlo.convert(x, torch.float64)
    nearest = hlo.floor(wide * (2 / math.pi) + 0.5)
    r = (wide - nearest * _HALF_PI) - nearest * _REST
    square = r * r
    quadrant = hlo.convert(nearest, torch.int32) + quarters
    is_sine = (quadrant & 1).eq(0)
    value = hlo.select(is_sine, r * _polynomial(square, _SINE), _polynomial(square, _COSINE))
    result = hlo.convert(hlo.select((quadrant & 2).eq(0), value, -value), torch.float32)

    def is_large() -> Array:
        return hlo.abs_(x) >= _LIMIT

    return structured.while_loop(
        [structured.reduce_or(is_large(), range(x.ndim)), result],
        lambda some, _: some,
        lambda _, result: [hlo.constant(False, torch.bool), hlo.select(is_large(), exact(x), result)],
    )[1]
