"""Fake quantisation: rounding to the values that integers of few bits can stand for, and back; with its observer.

A value x becomes the integer q = round(x / scale) + zero point, limited to [low, high], and (q - zero point)·scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, decompose, lower

# PyTorch takes no smaller scale than this.
_SMALLEST_SCALE = 6.1e-5


def _check_range(low: int, high: int, zero_point: Array | None = None, check: Check | None = None) -> None:
    if low > high:
        raise RuntimeError("`quant_min` should be less than or equal to `quant_max`.")
    if zero_point is not None and check is not None and zero_point.size:
        inside = (zero_point >= low) & (zero_point <= high)
        message = "`zero_point` must be between `quant_min` and `quant_max`."
        check(structured.reduce_and(inside, range(inside.ndim)), message, RuntimeError)


def _by_channel(parameter: Array, x: Array, axis: int) -> Array:
    """A value per channel, aligned with dimension `axis` of `x`."""
    if not 0 <= axis < x.ndim:
        raise RuntimeError("`axis` must be between 0 and number of dimensions of input")
    if parameter.ndim != 1 or parameter.size != x.shape[axis]:
        raise RuntimeError("dimensions of scale and zero-point are not consistent with input tensor")
    return hlo.reshape(parameter, [parameter.size if d == axis else 1 for d in range(x.ndim)])


def _quantized(x: Array, scale: Array, zero_point: Array) -> Array:
    """The integer of each value, as a float, before it is limited. A zero point that is a float isn't rounded alone."""
    steps = x * (1 / scale)
    if zero_point.dtype.is_floating_point:
        return hlo.round_nearest_even(steps + hlo.convert(zero_point, x.dtype))
    return hlo.round_nearest_even(steps) + hlo.convert(zero_point, x.dtype)


def _fake_quantized(x: Array, scale: Array, zero_point: Array, low: int, high: int) -> tuple[Array, Array]:
    """The values after rounding, and which of them were not cut off at an end of the range."""
    wide = compute_dtype(x.dtype)
    scale = hlo.convert(scale, wide)
    quantized = _quantized(hlo.convert(x, wide), scale, zero_point)
    value = (hlo.clamp(low, quantized, high) - hlo.convert(zero_point, wide)) * scale
    return hlo.convert(value, x.dtype), (quantized >= low) & (quantized <= high)


@lower("fake_quantize_per_tensor_affine_cachemask", data=["zero_point"])
def fake_quantize_per_tensor(
    x: Array, scale: ArrayLike, zero_point: ArrayLike, quant_min: int, quant_max: int, *, check: Check
) -> tuple[Array, Array]:
    # A compiled graph has the numbers themselves.
    scale, zero_point = hlo.as_array(scale, compute_dtype(x.dtype)), hlo.as_array(zero_point, torch.int64)
    _check_range(quant_min, quant_max, zero_point, check)
    return _fake_quantized(x, scale, zero_point, quant_min, quant_max)


@lower("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize_with_tensor_parameters(
    x: Array, scale: Array, zero_point: Array, enabled: Array, quant_min: int, quant_max: int
) -> list[Array]:
    _check_range(quant_min, quant_max)
    value, inside = _fake_quantized(x, _single(scale), _single(zero_point), quant_min, quant_max)
    on = _single(enabled).ne(0)
    return [hlo.select(on, value, x), inside | ~on]


def _single(x: Array) -> Array:
    return hlo.reshape(x, ())


@lower("fake_quantize_per_channel_affine_cachemask")
def fake_quantize_per_channel(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, *, check: Check
) -> tuple[Array, Array]:
    _check_range(quant_min, quant_max, None if zero_point.dtype.is_floating_point else zero_point, check)
    scale, zero_point = (_by_channel(p, x, axis) for p in (scale, zero_point))
    return _fake_quantized(x, scale, zero_point, quant_min, quant_max)


# --- with parameters that are learned ----------------------------------------------------------------------------


def _whole(zero_point: Array, low: int, high: int) -> Array:
    """A learned zero point as the integer it stands for."""
    return hlo.convert(hlo.clamp(low, hlo.round_nearest_even(zero_point), high), torch.int32)


@lower("_fake_quantize_learnable_per_tensor_affine")
def learnable_per_tensor(
    x: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: ArrayLike = 1.0
) -> Array:
    _check_range(quant_min, quant_max)
    whole = _whole(_single(zero_point), quant_min, quant_max)
    return _fake_quantized(x, _single(scale), whole, quant_min, quant_max)[0]


@lower("_fake_quantize_learnable_per_channel_affine")
def learnable_per_channel(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, grad_factor: ArrayLike = 1.0
) -> Array:
    _check_range(quant_min, quant_max)
    scale, whole = (_by_channel(p, x, axis) for p in (scale, _whole(zero_point, quant_min, quant_max)))
    return _fake_quantized(x, scale, whole, quant_min, quant_max)[0]


def _learned_gradients(
    grad: Array, x: Array, scale: Array, zero_point: Array, low: int, high: int, factor: ArrayLike
) -> tuple[Array, Array, Array]:
    """For x, and for each element its part of those for the scale and the zero point.

    Inside the range the scale moves a value by its rounding error; cut off at an end it carries the whole range.
    """
    quantized = hlo.round_nearest_even(x * (1 / scale)) + zero_point
    inside = (quantized >= low) & (quantized <= high)
    limited = hlo.clamp(low, quantized, high) - zero_point
    by_scale = hlo.select(inside, (limited * scale - x) * (1 / scale), limited)
    by_zero_point = hlo.select(inside, 0, hlo.broadcast_to(-scale, x.shape))
    factor = hlo.as_array(factor, grad.dtype)
    return hlo.select(inside, grad, 0), grad * by_scale * factor, grad * by_zero_point * factor


def _check_includes_zero(low: int, high: int) -> None:
    if low > 0 or high < 0:
        raise RuntimeError("Expecting `quant_min` <= 0 and `quant_max` >= 0")


@lower("_fake_quantize_learnable_per_tensor_affine_backward")
def learnable_per_tensor_backward(
    grad: Array,
    x: Array,
    scale: Array,
    zero_point: Array,
    quant_min: int,
    quant_max: int,
    grad_factor: ArrayLike = 1.0,
) -> list[Array]:
    """The zero point is rounded by adding a half and cutting off, as the CPU does here."""
    _check_includes_zero(quant_min, quant_max)
    if not x.size:
        return [x, scale, zero_point]
    limited = hlo.clamp(quant_min, _single(zero_point) + 0.5, quant_max)
    whole = hlo.convert(hlo.convert(limited, torch.int32), x.dtype)
    grads = _learned_gradients(grad, x, _single(scale), whole, quant_min, quant_max, grad_factor)
    return [grads[0], *(hlo.reshape(structured.reduce_sum(g, range(x.ndim)), (1,)) for g in grads[1:])]


@lower("_fake_quantize_learnable_per_channel_affine_backward")
def learnable_per_channel_backward(
    grad: Array,
    x: Array,
    scale: Array,
    zero_point: Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: ArrayLike = 1.0,
) -> list[Array]:
    _check_includes_zero(quant_min, quant_max)
    if not x.size:
        return [x, scale, zero_point]
    wide = compute_dtype(x.dtype)
    x, grad, scale, zero_point = (hlo.convert(a, wide) for a in (x, grad, scale, zero_point))
    whole = hlo.convert(_whole(zero_point, quant_min, quant_max), wide)
    scale, whole = (_by_channel(p, x, axis) for p in (scale, whole))
    grads = _learned_gradients(grad, x, scale, whole, quant_min, quant_max, grad_factor)
    others = [d for d in range(x.ndim) if d != axis]
    return [grads[0], *(structured.reduce_sum(g, others) for g in grads[1:])]


# --- with an observer --------------------------------------------------------------------------------------------


def _moving_average(old: Array, new: Array, weight: ArrayLike) -> Array:
    """The first observation replaces an infinite start."""
    return hlo.select(hlo.abs_(old).eq(math.inf), new, old + hlo.as_array(weight, old.dtype) * (new - old))


def _parameters_of_range(least: Array, greatest: Array, low: int, high: int, *, symmetric: bool) -> tuple[Array, Array]:
    """Scale and zero point (as a float) so that [least, greatest], widened to hold 0, becomes [low, high].

    The zero point comes from the end where it is the more exact. `symmetric`: 0 is the middle of the range, if there
    are values on both sides of it.
    """
    both_sides = (least < 0) & (greatest > 0)
    least, greatest = (hlo.convert(end, torch.float32) for end in (least, greatest))
    if symmetric:
        middle_low, middle_high = -((high - low) // 2 + 1), (high - low) // 2
        step = hlo.maximum(hlo.abs_(least / middle_low), hlo.abs_(greatest / middle_high))
        least = hlo.select(both_sides, step * middle_low, least)
        greatest = hlo.select(both_sides, step * middle_high, greatest)
    least, greatest = (hlo.convert(end, torch.float64) for end in (hlo.minimum(least, 0), hlo.maximum(greatest, 0)))
    scale = _in_single_precision((greatest - least) / (high - low))
    scale = hlo.select(scale.eq(0) | _in_single_precision(1 / scale).eq(math.inf), _in_single_precision(0.1), scale)
    is_small, smallest = scale < _SMALLEST_SCALE, _in_single_precision(_SMALLEST_SCALE)
    growth, span = smallest / scale, smallest * (high - low)
    new_least = hlo.select(least.eq(0), 0, hlo.select(greatest.eq(0), -span, least * growth))
    new_greatest = hlo.select(greatest.eq(0), 0, hlo.select(least.eq(0), span, greatest * growth))
    least, greatest = hlo.select(is_small, new_least, least), hlo.select(is_small, new_greatest, greatest)
    scale = hlo.select(is_small, smallest, scale)
    from_least, from_greatest = low - least / scale, high - greatest / scale
    least_is_exact = abs(low) + hlo.abs_(least / scale) < abs(high) + hlo.abs_(greatest / scale)
    zero_point = hlo.select(least_is_exact, from_least, from_greatest)
    if symmetric:
        zero_point = hlo.select(both_sides, (low + high) / 2, zero_point)
    return scale, hlo.clamp(low, hlo.round_nearest_even(zero_point), high)


def _in_single_precision(x: ArrayLike) -> Array:
    """Rounded to float32, which scales are kept in, for further computation in float64."""
    return hlo.convert(hlo.as_array(x, torch.float32), torch.float64)


@lower("_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional")
def fused_moving_average_observer(
    x: Array,
    observer_on: Array,
    fake_quant_on: Array,
    running_min: Array,
    running_max: Array,
    scale: Array,
    zero_point: Array,
    averaging_const: ArrayLike,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> list[Array]:
    """Moves the running range towards that of `x`, derives scale and zero point from it, and quantises by them.

    Returns the value, the mask and the new state. With `per_row_fake_quant` each row has its own range.
    """
    _check_range(quant_min, quant_max)
    if per_row_fake_quant and ch_axis:
        raise RuntimeError("Per-channel FakeQuant in fused_moving_avg_obs_fake_quant is only supported on axis == 0")
    observing, quantizing = _single(observer_on).ne(0), _single(fake_quant_on).ne(0)
    dims: Sequence[int] = [1] if per_row_fake_quant else range(x.ndim)
    ends = structured.reduce_min(x, dims), structured.reduce_max(x, dims)
    state = []
    for old, new in zip((running_min, running_max), ends, strict=True):
        new = hlo.reshape(hlo.convert(new, old.dtype), old.shape)
        state.append(hlo.select(observing, _moving_average(old, new, averaging_const), old))
    chosen = _parameters_of_range(state[0], state[1], quant_min, quant_max, symmetric=symmetric_quant)
    for old, new in zip((scale, zero_point), chosen, strict=True):
        new = hlo.reshape(hlo.convert(new, old.dtype), old.shape)
        state.append(hlo.select(quantizing, new, old))
    parameters = [_by_channel(p, x, 0) if per_row_fake_quant else _single(p) for p in state[2:]]
    value, inside = _fake_quantized(x, parameters[0], parameters[1], quant_min, quant_max)
    return [hlo.select(quantizing, value, x), inside | ~quantizing, *state]


@decompose("dequantize.self")
def dequantize(x: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is not quantised."""
    return x.float()
