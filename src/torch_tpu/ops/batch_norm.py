"""Batch normalisation in all the forms PyTorch calls it, and the pieces of synchronised batch normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Spec, decompose, lower
from torch_tpu.ops.normalization import (
    affine,
    chosen,
    inverse_deviation,
    moments,
    scalar,
    widen,
)

Optional = Array | None


@overload
def _by_channel(parameter: Array, x: Array) -> Array: ...
@overload
def _by_channel(parameter: None, x: Array) -> None: ...
def _by_channel(parameter: Optional, x: Array) -> Optional:
    """A value per channel, aligned with dimension 1 of `x`."""
    return None if parameter is None else hlo.reshape(parameter, (1, x.shape[1], *[1] * (x.ndim - 2)))


def _all_but_channels(x: Array) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def batch_norm(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: Array | float,
    eps: Array | float,
) -> tuple[Array, Array, Array, Optional, Optional]:
    """Result, mean, inverse deviation (of the batch in training, else of the running statistics), new statistics."""
    x, weight, bias, old_mean, old_var = widen(x, weight, bias, running_mean, running_var)
    new_mean, new_var = None, None
    if training:
        mean, variance = moments(x, _all_but_channels(x))
        flat_mean, flat_var = (hlo.reshape(a, (x.shape[1],)) for a in (mean, variance))
        count = x.size // x.shape[1] if x.shape[1] else 0
        unbiased = flat_var * count / hlo.constant(count - 1, x.dtype)
        new_mean, new_var = (
            None if old is None else _blend(old, new, momentum)
            for old, new in ((old_mean, flat_mean), (old_var, unbiased))
        )
    else:
        assert old_mean is not None
        assert old_var is not None
        return *_with_statistics(x, old_mean, inverse_deviation(old_var, eps), weight, bias), None, None
    rstd = inverse_deviation(variance, eps)
    result = affine((x - mean) * rstd, _by_channel(weight, x), _by_channel(bias, x))
    return result, flat_mean, hlo.reshape(rstd, (x.shape[1],)), new_mean, new_var


def _with_statistics(
    x: Array, mean: Array, rstd: Array, weight: Optional, bias: Optional
) -> tuple[Array, Array, Array]:
    """Result for given statistics of each channel: x·scale + shift, as PyTorch computes it."""
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    flat = x
    if module.target().platform == "cpu":
        # The longer the innermost dimension, the better its code; on a TPU this would be another layout.
        flat = hlo.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
    return hlo.reshape(affine(flat, _by_channel(scale, flat), _by_channel(shift, flat)), x.shape), mean, rstd


def _blend(old: Array, new: Array, momentum: Array | float) -> Array:
    momentum = scalar(momentum, new)
    return momentum * new + (1 - momentum) * old


@lower("native_batch_norm", mutates=["running_mean", "running_var"])
@lower("_native_batch_norm_legit")
def native_batch_norm(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: Array | float,
    eps: Array | float,
    *,
    out: list[Spec],
) -> list[Optional]:
    result, *saved, new_mean, new_var = batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    # In evaluation the CPU saves nothing: an empty tensor each.
    saved = [
        s if spec.shape == s.shape else hlo.zeros((0,), spec.dtype) for s, spec in zip(saved, out[1:], strict=True)
    ]
    return [result, *saved, new_mean, new_var]


@lower("_native_batch_norm_legit.no_stats")
def native_batch_norm_no_stats(
    x: Array, weight: Optional, bias: Optional, training: bool, momentum: Array | float, eps: Array | float
) -> tuple[Array, Array, Array]:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@lower("_native_batch_norm_legit_functional")
def native_batch_norm_functional(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: Array | float,
    eps: Array | float,
    *,
    out: list[Spec],
) -> list[Optional]:
    *results, new_mean, new_var = native_batch_norm(
        x, weight, bias, running_mean, running_var, training, momentum, eps, out=out[:3]
    )
    return [*results, new_mean or running_mean, new_var or running_var]


@lower("_native_batch_norm_legit_no_training")
def native_batch_norm_no_training(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Array,
    running_var: Array,
    momentum: Array | float,
    eps: Array | float,
    *,
    out: list[Spec],
) -> list[Optional]:
    return native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, out=out)[:3]


@lower("_batch_norm_with_update", "_batch_norm_with_update_functional")
def batch_norm_with_update(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Array,
    running_var: Array,
    momentum: Array | float,
    eps: Array | float,
) -> list[Optional]:
    """Training; the fourth result is cuDNN's reserve, always empty here."""
    *results, new_mean, new_var = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return [*results, hlo.zeros((0,), torch.uint8), new_mean, new_var]


@lower("_batch_norm_no_update")
def batch_norm_no_update(
    x: Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: Array | float,
    eps: Array | float,
    *,
    out: list[Spec],
) -> list[Optional]:
    results = native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, out=out[:3])
    return [*results[:3], hlo.zeros((0,), torch.uint8)]


@lower("native_batch_norm_backward")
def native_batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_invstd: Optional,
    train: bool,
    eps: Array | float,
    mask: Sequence[bool],
) -> list[Optional]:
    x, grad, weight, running_mean, running_var, mean, rstd = widen(
        x, grad, weight, running_mean, running_var, save_mean, save_invstd
    )
    if not train:
        assert running_var is not None
        mean, rstd = running_mean, inverse_deviation(running_var, eps)
    assert mean is not None
    assert rstd is not None
    dims, rstd = _all_but_channels(x), _by_channel(rstd, x)
    x_hat = (x - _by_channel(mean, x)) * rstd
    grad_weight, grad_bias = structured.reduce_sum(grad * x_hat, dims), structured.reduce_sum(grad, dims)
    if train:
        # What mean and variance contribute follows from the same two sums.
        count = max(x.size // x.shape[1], 1)
        grad = grad - (_by_channel(grad_bias / count, x) + x_hat * _by_channel(grad_weight / count, x))
    return chosen([affine(grad, _by_channel(weight, x), None) * rstd, grad_weight, grad_bias], mask)


@lower("batch_norm_backward")
def batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_var: Optional,
    update: bool,
    eps: Array | float,
    mask: Sequence[bool],
    reserve: Array,
) -> list[Optional]:
    return native_batch_norm_backward(
        grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask
    )


# --- statistics without normalisation, and SyncBatchNorm's steps --------------------------------------------------

Tensor = torch.Tensor


def _channel_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _aligned(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@decompose("batch_norm_update_stats")
def batch_norm_update_stats(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the batch; the running variance takes the unbiased one."""
    variance, mean = torch.var_mean(_wide(x), _channel_dims(x), correction=0)
    count = x.numel() / x.shape[1]
    if running_mean is not None:
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
    if running_var is not None:
        running_var.copy_(momentum * variance * (count / (count - 1)) + (1 - momentum) * running_var)
    return mean, variance


@decompose("batch_norm_stats")
def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_wide(x), _channel_dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


@decompose("batch_norm_elemt")
def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    result = (_wide(x) - _aligned(mean, x)) * _aligned(invstd, x)
    if weight is not None:
        result = result * _aligned(weight, x)
    return (result if bias is None else result + _aligned(bias, x)).to(x.dtype)


@decompose("batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Statistics of all processes' batches together from each process's own (rows of `mean` and `invstd`)."""
    counts = counts.to(mean.dtype).unsqueeze(1)
    total = counts.sum()
    global_mean = (mean * counts).sum(0) / total
    own = 1 / (invstd * invstd) - eps
    variance = ((own + (mean - global_mean) ** 2) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.copy_(momentum * global_mean + (1 - momentum) * running_mean)
    if running_var is not None:
        running_var.copy_(momentum * variance * (total / (total - 1)) + (1 - momentum) * running_var)
    return global_mean, torch.rsqrt(variance + eps)


@decompose("batch_norm_gather_stats")
def batch_norm_gather_stats(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.full((mean.shape[0],), float(count), dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts)


@decompose("batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of grad and of grad·(x - mean) per channel, and the gradients of weight and bias."""
    dims = _channel_dims(x)
    wide = _wide(grad)
    sum_dy, sum_dy_xmu = wide.sum(dims), (wide * (_wide(x) - _aligned(mean, x))).sum(dims)
    dtype = grad.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


@decompose("batch_norm_backward_elemt")
def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    scale = invstd if weight is None else invstd * weight
    along = _aligned(sum_dy_xmu / total * invstd * invstd, x)
    centred = _wide(grad) - _aligned(sum_dy / total, x) - (_wide(x) - _aligned(mean, x)) * along
    return (centred * _aligned(scale, x)).to(grad.dtype)
