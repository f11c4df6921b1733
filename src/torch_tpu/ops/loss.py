"""Losses of two tensors, element by element and then reduced, and their derivatives."""

from __future__ import annotations

from typing import Any

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype, elementwise
from torch_tpu.ops.core.registry import Check, lower, negative

NONE, MEAN, SUM = 0, 1, 2


def reduced(loss: Array, reduction: int) -> Array:
    """The loss, its mean or its sum."""
    if reduction == NONE:
        return loss
    total = structured.reduce_sum(loss, range(loss.ndim))
    return total / hlo.constant(loss.size, total.dtype) if reduction == MEAN else total


def spread(grad: Array, shape: tuple[int, ...], reduction: int) -> Array:
    """The derivative of `reduced`: what each element of the loss receives of `grad`."""
    count = 1
    for size in shape:
        count *= size
    return grad / max(count, 1) if reduction == MEAN else grad


@elementwise("mse_loss")
def mse_loss(x: Array, y: Array, reduction: int = MEAN) -> Array:
    return reduced(hlo.square(x - y), reduction)


@elementwise("mse_loss_backward")
def mse_loss_backward(grad: Array, x: Array, y: Array, reduction: int) -> Array:
    distance = x - y
    return 2 * distance * spread(grad, distance.shape, reduction)


def _is_no_delta(number: Any) -> bool:
    return not number > 0


@elementwise("smooth_l1_loss", static={"beta": negative})
def smooth_l1_loss(x: Array, y: Array, reduction: int = MEAN, beta: ArrayLike = 1.0) -> Array:
    if not isinstance(beta, Array) and negative(beta):
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    distance = hlo.abs_(x - y)
    near = 0.5 * distance * distance / beta
    return reduced(hlo.select(distance < beta, near, distance - 0.5 * beta), reduction)


@elementwise("smooth_l1_loss_backward")
def smooth_l1_loss_backward(grad: Array, x: Array, y: Array, reduction: int, beta: ArrayLike) -> Array:
    distance = x - y
    slope = hlo.select(hlo.abs_(distance) < beta, distance / beta, hlo.sign(distance))
    return slope * spread(grad, distance.shape, reduction)


@elementwise("huber_loss", static={"delta": _is_no_delta})
def huber_loss(x: Array, y: Array, reduction: int = MEAN, delta: ArrayLike = 1.0) -> Array:
    if not isinstance(delta, Array) and _is_no_delta(delta):
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    distance = hlo.abs_(x - y)
    far = delta * (distance - 0.5 * delta)
    return reduced(hlo.select(distance < delta, 0.5 * distance * distance, far), reduction)


@elementwise("huber_loss_backward")
def huber_loss_backward(grad: Array, x: Array, y: Array, reduction: int, delta: ArrayLike) -> Array:
    distance = x - y
    return hlo.clamp(-delta, distance, delta) * spread(grad, distance.shape, reduction)


@elementwise("soft_margin_loss")
def soft_margin_loss(x: Array, y: Array, reduction: int = MEAN) -> Array:
    return reduced(hlo.log1p(hlo.exp(-y * x)), reduction)


@elementwise("soft_margin_loss_backward")
def soft_margin_loss_backward(grad: Array, x: Array, y: Array, reduction: int) -> Array:
    slope = -y * hlo.logistic(-y * x)
    return slope * spread(grad, slope.shape, reduction)


# --- binary cross-entropy ----------------------------------------------------------------------------------------


def _weighted(loss: Array, weight: Array | None) -> Array:
    return loss if weight is None else loss * weight


@lower("binary_cross_entropy")
def binary_cross_entropy(
    x: Array, y: Array, weight: Array | None = None, reduction: int = MEAN, *, check: Check
) -> Array:
    """Logarithms are limited to -100, so that a probability of 0 or 1 gives a finite loss."""
    x, y, weight = cast([x, y, weight], compute_dtype(x.dtype))
    for name, values in (("input", x), ("target", y)):
        inside = structured.reduce_and((values >= 0) & (values <= 1), range(values.ndim))
        check(inside, f"all elements of {name} should be between 0 and 1", RuntimeError)
    loss = (y - 1) * hlo.maximum(hlo.log1p(-x), -100) - y * hlo.maximum(hlo.log(x), -100)
    return reduced(_weighted(loss, weight), reduction)


@elementwise("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad: Array, x: Array, y: Array, weight: Array | None = None, reduction: int = MEAN
) -> Array:
    slope = (x - y) / hlo.maximum((1 - x) * x, 1e-12)
    return _weighted(slope, weight) * spread(grad, x.shape, reduction)


@elementwise("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: Array, y: Array, weight: Array | None = None, pos_weight: Array | None = None, reduction: int = MEAN
) -> Array:
    softplus = hlo.log1p(hlo.exp(-hlo.abs_(x))) + hlo.maximum(-x, 0)
    if pos_weight is not None:
        softplus = softplus * (1 + (pos_weight - 1) * y)
    return reduced(_weighted((1 - y) * x + softplus, weight), reduction)
