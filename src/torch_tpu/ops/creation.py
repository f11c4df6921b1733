"""Tensors made from sizes and numbers, triangles."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike, Number
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, lower

# --- one value ---------------------------------------------------------------------------------------------------


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
def fill(x: Array, value: ArrayLike) -> Array:
    return _filled(value, Spec(x.shape, x.dtype))


@lower("scalar_tensor")
def scalar_tensor(value: ArrayLike, *, out: Spec, **options: Any) -> Array:
    return _filled(value, out)


def _filled(value: ArrayLike, out: Spec) -> Array:
    return hlo.broadcast_to(hlo.as_array(value, out.dtype), out.shape)


# --- ranges ------------------------------------------------------------------------------------------------------


@lower("arange", static=["end"])
def arange(end: Number, *, out: Spec, **options: Any) -> Array:
    return _progression(0, 1, out)


@lower("arange.start", "arange.start_step", "range", "range.step", static=["start", "end", "step"])
def arange_from(start: Number, end: Number, step: Number = 1, *, out: Spec, **options: Any) -> Array:
    return _progression(start, step, out)


def _progression(start: ArrayLike, step: ArrayLike, out: Spec) -> Array:
    """start + step·i in the dtype the CPU accumulates in: float64 for floats, int64 (after truncation) for integers."""
    wide = torch.float64 if out.dtype.is_floating_point else torch.int64
    return hlo.iota(out.shape, 0, wide) * hlo.as_array(step, wide) + hlo.as_array(start, wide)


# What the kernels in `eager.kernels.ranges` run: of `arange`'s numbers only the length is part of the program.
@lower("tpu::range", wide=True)
def lower_range(length: int, start: ArrayLike, step: ArrayLike, *, dtype: torch.dtype) -> Array:
    return hlo.convert(_progression(start, step, Spec((length,), dtype)), dtype)


@lower("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", wide=True)
def linspace(start: ArrayLike, end: ArrayLike, steps: int, *, out: Spec, **options: Any) -> Array:
    """Integers lie between truncated ends, are spaced in float64 and truncated."""
    return _spaced(start, end, steps, out.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return compute_dtype(dtype) if dtype.is_floating_point or dtype.is_complex else torch.float64


def _spaced(first: ArrayLike, last: ArrayLike, steps: int, dtype: torch.dtype) -> Array:
    """Counted from the nearer end, so that both ends are exact."""
    wide = _wide(dtype)
    start, end = (hlo.as_array(number, wide) for number in (first, last))
    if not (dtype.is_floating_point or dtype.is_complex):
        start, end = (hlo.convert(hlo.convert(number, dtype), wide) for number in (start, end))
    # XLA would multiply by the rounded inverse of a constant, and integers would miss their steps.
    step = (end - start) / structured.optimization_barrier(hlo.constant(max(steps - 1, 1), wide))
    i = hlo.iota((steps,), 0, torch.int64)
    from_start = start + step * hlo.convert(i, step.dtype)
    from_end = end - step * hlo.convert(steps - 1 - i, step.dtype)
    return hlo.select(i < steps // 2, from_start, from_end) if steps > 1 else hlo.broadcast_to(start, (steps,))


@lower("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor", wide=True)
def logspace(
    start: ArrayLike, end: ArrayLike, steps: int, base: ArrayLike = 10.0, *, out: Spec, **options: Any
) -> Array:
    return hlo.power(hlo.as_array(base, _wide(out.dtype)), _spaced(start, end, steps, out.dtype))


# --- matrices ----------------------------------------------------------------------------------------------------


@lower("eye", "eye.m")
def eye(n: int, *arguments: Any, out: Spec, **options: Any) -> Array:
    return hlo.convert(_above(out.shape).eq(0), out.dtype)


def _above(shape: tuple[int, ...]) -> Array:
    """By how much each element of a matrix lies above the main diagonal."""
    rows, columns = (hlo.iota(shape[-2:], d, torch.int64) for d in range(2))
    return columns - rows


@lower("tril")
def tril(x: Array, diagonal: int = 0) -> Array:
    return hlo.select(_above(x.shape) <= diagonal, x, hlo.full_like(x, 0))


@lower("triu")
def triu(x: Array, diagonal: int = 0) -> Array:
    return hlo.select(_above(x.shape) >= diagonal, x, hlo.full_like(x, 0))
