"""Rules of losses: means are taken over the true elements, labels in the padding are ignored."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets.padded_layout import Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.rule_table import (
    argument,
    aten,
    given,
    rule,
)
from torch_tpu.compile.buckets.rules_of_elementwise import elementwise
from torch_tpu.compile.buckets.rules_of_reductions import mean_of
from torch_tpu.compile.buckets.symbolic_sizes import Number

_ELEMENTWISE_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_NONE, _MEAN = 0, 1


@rule(*_ELEMENTWISE_LOSSES, "binary_cross_entropy_with_logits")
def loss(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    each = elementwise(ctx, node, given(node, values, "reduction", _NONE))
    reduction_ = argument(node, values, "reduction", _MEAN)
    dims = list(range(each.dim()))
    if reduction_ == _NONE:
        return each
    if reduction_ == _MEAN:
        return mean_of(ctx, each, dims, False)
    return ctx.place(ctx.call(aten.sum.dim_IntList, [ctx.filled(each, 0), dims, False, None]), ())


@rule(*(f"{name}_backward" for name in _ELEMENTWISE_LOSSES))
def loss_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.broadcast(values[1:3])
    if argument(node, values, "reduction", _MEAN) == _MEAN:
        grad = ctx.call(aten.div.Tensor, [values[0], ctx.true_size(layout)])
        values = [ctx.place(grad, layout_of(values[0])), *values[1:]]
    # Their meta kernels give what the reduction asks for, which is elementwise here.
    return elementwise(ctx, node, given(node, values, "reduction", _NONE))


def _labels(ctx: PaddedTracer, node: Node, values: list[Any], x: torch.Tensor, target: torch.Tensor) -> list[Any]:
    """The values with scores of 0 and labels that are ignored in the padding."""
    if any(map(is_padded, layout_of(x)[1 if x.dim() > 1 else 0 :][:1])):
        raise Unsound("over padded classes")
    ignored = argument(node, values, "ignore_index", -100)
    if isinstance(ignored, Number):
        raise Unsound("of a label that varies")
    values = given(node, values, "self", ctx.filled(x, 0))
    return given(node, values, "target", ctx.filled(target, ignored))


@rule("nll_loss_forward", "nll_loss2d_forward")
def class_loss(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target, _, reduction_, _ = values
    result = ctx.call(node.target, _labels(ctx, node, values, x, target))  # type: ignore[arg-type]
    ctx.place(result[0], layout_of(target) if reduction_ == _NONE else ())
    return result


@rule("nll_loss_backward", "nll_loss2d_backward")
def class_loss_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, x, target = values[:3]
    values = _labels(ctx, node, values, x, target)
    values = given(node, values, "grad_output", ctx.filled(grad, 0))
    return ctx.place(ctx.call(node.target, values), layout_of(x))  # type: ignore[arg-type]
