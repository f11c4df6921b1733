"""Rules of matrix products and convolutions: padding is set to zero where it would be added."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Unsound
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, is_padded_tensor, layout_of
from torch_tpu.compile.buckets.rule_table import (
    gradients,
    lengths,
    rule,
)

# Where the two factors stand among the arguments.
_FACTORS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}


@rule(*_FACTORS)
def product(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    first = _FACTORS[node.target.overloadpacket.__name__]  # type: ignore[union-attr]
    a, b = values[first : first + 2]
    left, right = layout_of(a), layout_of(b)
    inner = max(b.dim() - 2, 0)
    if layouts.broadcast([(left[-1],), (right[inner],)]) != (left[-1],):
        raise Unsound(f"of {layouts.describe(left)} and {layouts.describe(right)}")
    values = list(values)
    values[first : first + 2] = ctx.filled(a, 0, [-1]), ctx.filled(b, 0, [inner])
    batch = layouts.broadcast([left[:-2], right[:-2]]) if b.dim() > 2 else ()
    layout = (*batch, *left[len(batch) : -1], *right[inner + 1 :])
    if first and layouts.broadcast([layout_of(values[0]), layout]) != layout:
        raise Unsound(f"a sum with {layouts.describe(layout_of(values[0]))}")
    return ctx.place(ctx.call(node.target, values), layout)  # type: ignore[arg-type]


@rule("convolution", "convolution_overrideable")
def convolution(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, weight = values[:2]
    if is_padded_tensor(weight):
        raise Unsound("of padded weights")
    result = ctx.call(node.target, [ctx.filled(x, 0, range(1, x.dim())), *lengths(ctx, values[1:])])  # type: ignore[arg-type]
    sizes = ctx.sizes.layout(node.meta["val"].shape)
    return ctx.place(result, (layout_of(x)[0], *sizes[1:]))


@rule("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    grad, x, weight = values[:3]
    if is_padded_tensor(weight):
        raise Unsound("of padded weights")
    filled = [ctx.filled(grad, 0), ctx.filled(x, 0), *values[2:]]
    return gradients(ctx, node, lengths(ctx, filled), {0: layout_of(x)})
