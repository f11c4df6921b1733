"""Rules of attention as one operator: queries and keys in the padding are made to attend to nothing and by nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.rule_table import padded_of, rule
from torch_tpu.hlo import array as hlo


def _bias(ctx: PaddedTracer, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The bias with -inf for keys in the padding, and 0 for queries there."""
    keys = layout_of(k)[-2]
    if bias is not None:
        bias = ctx.filled(bias, 0, range(bias.dim() - 1))
    if not is_padded(keys):
        return bias
    length = ctx.sizes.padded(layouts.size_of(keys))
    # Such a query sees the padding too, or its weights would be those of nothing.
    mask = hlo.reshape(ctx.mask(keys), (1, 1, 1, length))
    given = hlo.constant(0, q.dtype, (1, 1, 1, length)) if bias is None else ctx.tracer.read(bias)
    array = hlo.select(mask, given, hlo.constant(float("-inf"), given.dtype))
    layout = ((1,), (1,), (1,), keys) if bias is None else (*layout_of(bias)[:-1], keys)
    return ctx.made(array, layout)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if layouts.broadcast([layout_of(k)[:-1], layout_of(v)[:-1]]) != layout_of(k)[:-1]:
        raise Unsound("of keys and values with different layouts")
    if layout_of(q)[:-2] != layout_of(k)[:-2]:
        raise Unsound("of queries and keys with different layouts")
    if any(map(is_padded, (layout_of(t)[-1] for t in (q, k, v)))):
        raise Unsound("over a padded head")
    if max(len(layout_of(q)[-2]), len(layout_of(k)[-2])) > 1:
        raise Unsound("over merged positions")


@rule("_scaled_dot_product_fused_attention_overrideable")
def attention(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    q, k, v, bias, dropout, *rest = values
    _check(q, k, v)
    keys = [ctx.filled(t, 0, [-2]) for t in (k, v)]
    layout = layout_of(q)
    values = [q, *keys, _bias(ctx, q, k, bias), dropout, *rest]
    result = ctx.draw(node.target, values, (*layout[:-1], layout_of(k)[-2]))  # type: ignore[arg-type]
    ctx.place(result[0], (*layout[:-1], layout_of(v)[-1]))
    ctx.place(result[1], layout[:-1])
    return result


@rule("_scaled_dot_product_fused_attention_overrideable_backward")
def attention_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    grad, q, k, v, bias, *rest = values
    mask, out, logsumexp = rest[:3]
    _check(q, k, v)
    # Autograd may have no gradient.
    rows = [t if t is None else ctx.filled(t, 0, [-2]) for t in (grad, q, k, v)]
    padded = _bias(ctx, q, k, bias)
    if padded is not None and bias is None:
        mask = [*mask[:3], False]
    sums = [d for d in range(4) if bias is not None and layout_of(bias)[-4:][d] == (1,)]
    if bias is not None and mask[3] and any(padded_of(q, [d]) for d in sums if d < 3):
        # The gradient of a bias that is broadcast is a sum over what it is broadcast to.
        rows = [t if t is None else ctx.filled(t, 0) for t in rows]
    values = [*rows, padded, mask, ctx.filled(out, 0), ctx.filled(logsumexp, 0), *(ctx.length(v) for v in rest[3:])]
    weights = (*layout_of(q)[:-1], layout_of(k)[-2])
    result = ctx.draw(node.target, values, weights)  # type: ignore[arg-type]
    for t, like in zip(result, (q, k, v, bias), strict=False):
        if isinstance(t, torch.Tensor) and like is not None:
            ctx.place(t, layout_of(like))
    return result
