"""Rules of batch normalisation: statistics are those of the true elements, whose number is their divisor."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets.padded_layout import Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.rule_table import aten, rule
from torch_tpu.compile.buckets.rules_of_reductions import mean_of


def _over(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that statistics are taken over, and the shape in which they meet `x`."""
    if is_padded(layout_of(x)[1]):
        raise Unsound("of padded channels")
    return [d for d in range(x.dim()) if d != 1], [x.shape[1] if d == 1 else 1 for d in range(x.dim())]


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype.itemsize < 4 else t


@rule("_native_batch_norm_legit_functional", "native_batch_norm", "_native_batch_norm_legit")
def batch_norm(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, weight, bias, mean, variance, training, momentum, eps = values
    if not training or node.target is not aten._native_batch_norm_legit_functional.default:
        raise Unsound("that is not functional training")
    dims, shape = _over(x)
    layout = layout_of(x)
    with ctx.tracer:
        wide = ctx.place(_wide(x).clone(), layout)
    own_mean = mean_of(ctx, wide, dims, False)
    with ctx.tracer:
        squares = ctx.place((wide - own_mean.view(shape)).square(), layout)
    own_variance = mean_of(ctx, squares, dims, False)
    count = ctx.true_size([layout[d] for d in dims])
    with ctx.tracer:
        scale = torch.rsqrt(own_variance + eps)
        result = (wide - own_mean.view(shape)) * scale.view(shape)
        if weight is not None:
            result = result * weight.view(shape)
        if bias is not None:
            result = result + bias.view(shape)
        unbiased = own_variance * (count / (count - 1))
        kept = [
            old * (1 - momentum) + new.to(old.dtype) * momentum for old, new in ((mean, own_mean), (variance, unbiased))
        ]
        return ctx.place(result.to(x.dtype), layout), own_mean, scale, *kept


@rule("native_batch_norm_backward")
def batch_norm_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    grad, x, weight, mean, variance, own_mean, own_scale, training, eps, wanted = values
    dims, shape = _over(x)
    layout = layout_of(x)
    grad, filled = ctx.filled(grad, 0), ctx.filled(x, 0)
    count = ctx.true_size([layout[d] for d in dims])
    with ctx.tracer:
        centre, scale = (own_mean, own_scale) if training else (mean, torch.rsqrt(variance + eps))
        grad, normal = _wide(grad), (_wide(filled) - centre.view(shape)) * scale.view(shape)
        of_bias, of_weight = grad.sum(dims), (grad * normal).sum(dims)
        inner = grad
        if training:
            inner = grad - (of_bias.view(shape) + normal * of_weight.view(shape)) / count
        factor = scale if weight is None else scale * weight
        result = (inner * factor.view(shape)).to(x.dtype)
        dtype = of_weight.dtype if weight is None else weight.dtype
        gradients = ctx.place(result, layout), of_weight.to(dtype), of_bias.to(dtype)
    return tuple(g if is_wanted else None for g, is_wanted in zip(gradients, wanted, strict=True))
