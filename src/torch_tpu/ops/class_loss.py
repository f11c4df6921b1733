"""Losses against class indices: negative log-likelihood and margins, and their derivatives."""

from __future__ import annotations

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import cast, compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import elements, read, region
from torch_tpu.ops.loss import MEAN, NONE, ArrayLike, reduced, spread
from torch_tpu.ops.reduction import index_dtype

# --- negative log-likelihood -------------------------------------------------------------------------------------


def take_class(x: Array, target: Array) -> Array:
    """x[n, target[n, …], …]: of (N, C, …) the value of one class at each position."""
    return hlo.squeeze(read(x, elements(x.shape, 1, hlo.expand_dims(target, 1))), 1)


def _class_weights(weight: Array | None, target: Array, like: Array, ignore_index: int) -> Array:
    """The weight of each target's class; 0 where it is ignored."""
    if weight is None:
        weights = hlo.full(target.shape, 1, like.dtype)
    else:
        weights = hlo.convert(read(weight, region(weight.shape, {0: target})), like.dtype)
    return hlo.select(target.ne(ignore_index), weights, 0)


@lower("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_forward(
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    *,
    out: list[Spec],
    check: Check,
) -> tuple[Array, Array]:
    target_in_bounds(target, x.shape[1 if x.ndim > 1 else 0], ignore_index, check)
    if x.ndim == 1:
        x, target = hlo.expand_dims(x, 0), hlo.reshape(target, (1,))
    x = cast(x, compute_dtype(x.dtype))
    weights = _class_weights(weight, target, x, ignore_index)
    loss = hlo.select(target.ne(ignore_index), -take_class(x, target) * weights, 0)
    if reduction == NONE:
        return hlo.reshape(loss, out[0].shape), hlo.zeros((), x.dtype)
    total_weight = structured.reduce_sum(weights, range(weights.ndim))
    total = structured.reduce_sum(loss, range(loss.ndim))
    return total / total_weight if reduction == MEAN else total, total_weight


def target_in_bounds(target: Array, classes: int, ignore_index: int, check: Check) -> None:
    target = hlo.reshape(target, [-1])
    valid = (target >= 0) & (target < classes) | target.eq(ignore_index)
    position = hlo.iota(target.shape, 0, index_dtype(target.size))
    first_wrong = position.eq(structured.reduce_min(hlo.select(valid, target.size, position), [0]))
    wrong = structured.reduce_sum(hlo.select(first_wrong, target, 0), [0])
    check(structured.reduce_and(valid, [0]), "Target {} is out of bounds.", IndexError, wrong)


@lower("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
    *,
    out: Spec,
) -> Array:
    wide = compute_dtype(x.dtype)
    grad, total_weight = cast([grad, total_weight], wide)
    shape = (1, *x.shape) if x.ndim == 1 else x.shape
    if x.ndim == 1:
        target, grad = hlo.reshape(target, (1,)), hlo.reshape(grad, (1,) if reduction == NONE else ())
    slope = -_class_weights(weight, target, grad, ignore_index) * grad
    if reduction == MEAN:
        slope = slope / total_weight
    hit = hlo.expand_dims(target, 1).eq(hlo.iota(shape, 1, target.dtype))
    slope = hlo.select(target.ne(ignore_index), slope, 0)
    return hlo.reshape(hlo.select(hit, hlo.expand_dims(slope, 1), hlo.zeros(shape, wide)), x.shape)


# --- margins -----------------------------------------------------------------------------------------------------


def _rows(x: Array) -> Array:
    """(N, C) scores; one sample may come without N."""
    return x if x.ndim == 2 else hlo.reshape(x, (1, x.size))


def _margins(x: Array, target: Array, margin: ArrayLike) -> tuple[Array, Array]:
    """By how much each class comes closer to the target's score than `margin`, and which class is the target."""
    hit = hlo.expand_dims(target, 1).eq(hlo.iota(x.shape, 1, target.dtype))
    excess = margin - hlo.expand_dims(take_class(x, target), 1) + x
    return hlo.select(hit, 0, hlo.maximum(excess, 0)), hit


def _target_weights(weight: Array | None, target: Array, x: Array) -> Array:
    return hlo.expand_dims(_class_weights(weight, target, x, -1), 1) / max(x.shape[1], 1)


@lower("multi_margin_loss", static=["p"])
def multi_margin_loss(
    x: Array,
    target: Array,
    p: int = 1,
    margin: ArrayLike = 1,
    weight: Array | None = None,
    reduction: int = MEAN,
    *,
    out: Spec,
    check: Check,
) -> Array:
    rows, margin = cast([_rows(x), margin], compute_dtype(x.dtype))
    target = hlo.reshape(target, rows.shape[:1])
    valid = (target >= 0) & (target < rows.shape[1])
    check(structured.reduce_and(valid, [0]), "target out of range", RuntimeError)
    excess, _ = _margins(rows, target, margin)
    powers = excess * excess if p == 2 else excess
    loss = structured.reduce_sum(powers * _target_weights(weight, target, rows), [1])
    return hlo.reshape(reduced(loss, reduction), out.shape)


@lower("multi_margin_loss_backward", static=["p"])
def multi_margin_loss_backward(
    grad: Array,
    x: Array,
    target: Array,
    p: int,
    margin: ArrayLike,
    weight: Array | None = None,
    reduction: int = MEAN,
) -> Array:
    rows, margin, grad = cast([_rows(x), margin, grad], compute_dtype(x.dtype))
    target = hlo.reshape(target, rows.shape[:1])
    excess, hit = _margins(rows, target, margin)
    slope = 2 * excess if p == 2 else hlo.convert(excess > 0, rows.dtype)
    slope = slope * _target_weights(weight, target, rows) * _per_row(grad, rows, reduction)
    pulled = hlo.expand_dims(structured.reduce_sum(slope, [1]), 1)
    return hlo.convert(hlo.reshape(hlo.select(hit, -pulled, slope), x.shape), x.dtype)


def _per_row(grad: Array, rows: Array, reduction: int) -> Array:
    grad = spread(grad, rows.shape[:1], reduction)
    return hlo.reshape(grad, (rows.shape[0], 1)) if reduction == NONE else grad


def _label_pairs(rows: Array, target: Array) -> tuple[Array, Array, Array]:
    """Of (N, C) scores and label lists that end at the first -1.

    Returns:
        which list entries count (N, K); which classes are labels (N, C); max(0, 1 - x[label] + x[other]) for each
        entry and class that is no label (N, K, C).
    """
    ended = hlo.convert(target < 0, rows.dtype)
    size = target.shape[1]
    earlier = hlo.iota((size, size), 0) <= hlo.iota((size, size), 1)
    listed = structured.dot_general(ended, hlo.convert(earlier, rows.dtype), ([1], [0])).eq(0)
    hit = hlo.expand_dims(target, 2).eq(hlo.iota((*target.shape, rows.shape[1]), 2, target.dtype))
    hit = hit & hlo.expand_dims(listed, 2)
    is_label = structured.reduce_or(hit, [1])
    score = structured.reduce_sum(hlo.select(hit, hlo.expand_dims(rows, 1), hlo.zeros(hit.shape, rows.dtype)), [2])
    excess = hlo.maximum(1 - hlo.expand_dims(score, 2) + hlo.expand_dims(rows, 1), 0)
    counts = hlo.expand_dims(listed, 2) & ~hlo.expand_dims(is_label, 1)
    return hit, is_label, hlo.select(counts, excess, 0)


@lower("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(
    x: Array, target: Array, reduction: int, *, out: list[Spec], check: Check
) -> tuple[Array, Array]:
    rows = cast(_rows(x), compute_dtype(x.dtype))
    target = hlo.reshape(target, rows.shape)
    valid = (target >= -1) & (target < rows.shape[1])
    check(structured.reduce_and(valid, [0, 1]), "target is out of range", RuntimeError)
    _, is_label, excess = _label_pairs(rows, target)
    loss = structured.reduce_sum(excess, [1, 2]) / max(rows.shape[1], 1)
    return hlo.reshape(reduced(loss, reduction), out[0].shape), hlo.reshape(is_label, out[1].shape)


@lower("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad: Array, x: Array, target: Array, reduction: int, is_target: Array) -> Array:
    rows, grad = cast([_rows(x), grad], compute_dtype(x.dtype))
    target = hlo.reshape(target, rows.shape)
    hit, _, excess = _label_pairs(rows, target)
    active = hlo.convert(excess > 0, rows.dtype)
    pulled = hlo.convert(hit, rows.dtype) * hlo.expand_dims(structured.reduce_sum(active, [2]), 2)
    slope = structured.reduce_sum(active, [1]) - structured.reduce_sum(pulled, [1])
    slope = slope / max(rows.shape[1], 1) * _per_row(grad, rows, reduction)
    return hlo.convert(hlo.reshape(slope, x.shape), x.dtype)
