"""Layer, group and RMS normalisation, their gradients, and weight normalisation.

Statistics are computed in float32 for float16 and bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVarTuple

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import cast, compute_dtype
from torch_tpu.ops.core.registry import lower

Others = TypeVarTuple("Others")


def widen(x: Array, *others: *Others) -> tuple[Array, *Others]:
    """The Arrays (or None) in the dtype in which results of the first one's dtype are computed."""
    dtype = compute_dtype(x.dtype)
    return hlo.convert(x, dtype), *cast(list(others), dtype)


def sum_keepdims(x: Array, dims: Sequence[int]) -> Array:
    return hlo.expand_dims(structured.reduce_sum(x, dims), *dims) if dims else x


def mean_keepdims(x: Array, dims: Sequence[int]) -> Array:
    return sum_keepdims(x, dims) / math.prod(x.shape[d] for d in dims)


def moments(x: Array, dims: Sequence[int]) -> tuple[Array, Array]:
    """Mean and biased variance by the corrected two-pass algorithm (Chan, Golub & LeVeque 1983, eq. 1.7)."""
    estimate = mean_keepdims(x, dims)
    deviation = x - estimate
    error = mean_keepdims(deviation, dims)
    return estimate + error, mean_keepdims(deviation * deviation, dims) - error * error


def inverse_deviation(variance: Array, eps: Array | float) -> Array:
    return 1 / hlo.sqrt(variance + scalar(eps, variance))


def scalar(value: Array | float, like: Array) -> Array | float:
    return hlo.convert(value, like.dtype) if isinstance(value, Array) else value


def affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def normalised_gradient(grad: Array, x_hat: Array, rstd: Array, dims: Sequence[int], *, centred: bool = True) -> Array:
    """The gradient for x of x_hat = (x - mean) · rstd, or of x · rstd when not `centred`."""
    along = x_hat * mean_keepdims(grad * x_hat, dims)
    return rstd * ((grad - mean_keepdims(grad, dims) - along) if centred else (grad - along))


def chosen(gradients: Sequence[Array | None], mask: Sequence[bool]) -> list[Array | None]:
    """The gradients asked for, each in its place; None for the others, as in PyTorch's own results."""
    return [g if wanted else None for g, wanted in zip(gradients, mask, strict=True)]


def _split(x: Array, normalized_shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Outer dimensions and the normalised ones."""
    axis = x.ndim - len(normalized_shape)
    return list(range(axis)), list(range(axis, x.ndim))


@lower("native_layer_norm")
def native_layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: Array | float
) -> list[Array]:
    _, inner = _split(x, normalized_shape)
    x, weight, bias = widen(x, weight, bias)
    mean, variance = moments(x, inner)
    rstd = inverse_deviation(variance, eps)
    return [affine((x - mean) * rstd, weight, bias), mean, rstd]


@lower("native_layer_norm_backward")
def native_layer_norm_backward(
    grad: Array,
    x: Array,
    normalized_shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    mask: Sequence[bool],
) -> list[Array | None]:
    outer, inner = _split(x, normalized_shape)
    x, grad, mean, rstd, weight, bias = widen(x, grad, mean, rstd, weight, bias)
    x_hat = (x - mean) * rstd
    grad_x = normalised_gradient(affine(grad, weight, None), x_hat, rstd, inner)
    grad_weight = None if weight is None else structured.reduce_sum(grad * x_hat, outer)
    grad_bias = None if bias is None else structured.reduce_sum(grad, outer)
    return chosen([grad_x, grad_weight, grad_bias], mask)


@lower("_fused_rms_norm")
def fused_rms_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, eps: Array | float | None
) -> list[Array]:
    """x / rms(x); a missing eps is the machine epsilon of the dtype it is computed in."""
    _, inner = _split(x, normalized_shape)
    x, weight = widen(x, weight)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    rstd = inverse_deviation(mean_keepdims(x * x, inner), eps)
    return [affine(x * rstd, weight, None), rstd]


@lower("_fused_rms_norm_backward")
def fused_rms_norm_backward(
    grad: Array, x: Array, normalized_shape: Sequence[int], rstd: Array, weight: Array | None, mask: Sequence[bool]
) -> list[Array | None]:
    outer, inner = _split(x, normalized_shape)
    x, grad, rstd, weight = widen(x, grad, rstd, weight)
    x_hat = x * rstd
    grad_x = normalised_gradient(affine(grad, weight, None), x_hat, rstd, inner, centred=False)
    grad_weight = None if weight is None else structured.reduce_sum(grad * x_hat, outer)
    return chosen([grad_x, grad_weight], mask)


@lower("native_group_norm")
def native_group_norm(
    x: Array, weight: Array | None, bias: Array | None, N: int, C: int, HxW: int, group: int, eps: Array | float
) -> list[Array]:
    if min(N, C, HxW) < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension: {[N, C, HxW]}")
    x, weight, bias = widen(x, weight, bias)
    grouped = hlo.reshape(x, (N, group, C // group, HxW))
    mean, variance = moments(grouped, [2, 3])
    rstd = inverse_deviation(variance, eps)
    weight, bias = (_by_group(p, group) for p in (weight, bias))
    result = affine((grouped - mean) * rstd, weight, bias)
    return [hlo.reshape(result, x.shape), hlo.reshape(mean, (N, group)), hlo.reshape(rstd, (N, group))]


@lower("native_group_norm_backward")
def native_group_norm_backward(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    mask: Sequence[bool],
) -> list[Array | None]:
    x, grad, mean, rstd, weight = widen(x, grad, mean, rstd, weight)
    shape = (N, group, C // group, HxW)
    grouped, grad = hlo.reshape(x, shape), hlo.reshape(grad, shape)
    mean, rstd = (hlo.expand_dims(a, 2, 3) for a in (mean, rstd))
    x_hat = (grouped - mean) * rstd
    weight = _by_group(weight, group)
    # All sums follow from these two, for each sample and channel.
    along, total = sum_keepdims(grad * x_hat, [3]), sum_keepdims(grad, [3])
    mean_along, mean_grad = (mean_of_sums(affine(s, weight, None), C // group * HxW) for s in (along, total))
    grad_x = rstd * (affine(grad, weight, None) - mean_grad - x_hat * mean_along)
    grad_weight, grad_bias = (hlo.reshape(structured.reduce_sum(s, [0]), (C,)) for s in (along, total))
    return chosen([hlo.reshape(grad_x, x.shape), grad_weight, grad_bias], mask)


def mean_of_sums(sums: Array, count: int) -> Array:
    """Of sums for each channel of a group, (N, group, channels, 1), the mean over the group's `count` elements."""
    return sum_keepdims(sums, [2]) / max(count, 1)


def _by_group(parameter: Array | None, group: int) -> Array | None:
    return None if parameter is None else hlo.reshape(parameter, (1, group, parameter.size // group, 1))


@lower("_weight_norm_interface")
def weight_norm_interface(v: Array, g: Array, dim: int = 0) -> list[Array]:
    """g · v / ‖v‖, the norm over every dimension but `dim`; and the norm."""
    wide, factor = widen(v, g)
    norm = hlo.sqrt(sum_keepdims(wide * wide, [d for d in range(v.ndim) if d != dim % v.ndim]))
    return [wide * (factor / norm), norm]


@lower("_weight_norm_interface_backward")
def weight_norm_interface_backward(grad: Array, v: Array, g: Array, norm: Array, dim: int) -> list[Array]:
    v, grad, g, norm = widen(v, grad, g, norm)
    projection = sum_keepdims(grad * v, [d for d in range(v.ndim) if d != dim % v.ndim])
    return [g / norm * (grad - v * (projection / (norm * norm))), projection / norm]
