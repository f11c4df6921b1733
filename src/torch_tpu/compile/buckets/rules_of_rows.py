"""Rules of operators that work on rows (layer norm, pooling, resizing): sound where those dimensions are not padded."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_tpu.compile.buckets.padded_layout import Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, is_padded_tensor, layout_of
from torch_tpu.compile.buckets.rule_table import (
    aten,
    gradients,
    lengths,
    rule,
)

# How many dimensions at the end each works on; of normalisations, as many as their weights have.
_TRAILING: dict[str, int] = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), -1),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"), 2),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d.vec", "reflection_pad2d"), 2),
    **dict.fromkeys(("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), 2),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), 3),
}


@rule(*_TRAILING)
def rows(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    layout = layout_of(x)
    name = str(target).removeprefix("aten.").removesuffix(".default")
    trailing = _TRAILING[name] if _TRAILING[name] > 0 else len(values[1])
    if any(map(is_padded, layout[len(layout) - trailing :])):
        raise Unsound("over a padded dimension")
    leading = layout[: len(layout) - trailing]
    result = ctx.call(target, lengths(ctx, values))  # type: ignore[arg-type]
    for t in tree_leaves(result):
        if isinstance(t, torch.Tensor):
            ctx.place(t, (*leading, *((int(s),) for s in t.shape[len(leading) :])))
    return result


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    """The gradients of the weights are sums over rows."""
    x = values[1]
    layout, length = layout_of(x), len(values[2])
    if any(map(is_padded, layout[len(layout) - length :])):
        raise Unsound("over a padded dimension")
    filled = [ctx.filled(v, 0) if is_padded_tensor(v) else v for v in values]
    return gradients(ctx, node, lengths(ctx, filled), {0: layout})


@rule("native_group_norm", "_native_batch_norm_legit_no_training")
def per_sample(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    """Of a batch that is padded, each sample by itself."""
    layout = layout_of(values[0])
    if any(map(is_padded, layout[1:])) and node.target is aten.native_group_norm.default:
        raise Unsound("over a padded dimension")
    result = ctx.call(node.target, lengths(ctx, values))  # type: ignore[arg-type]
    ctx.place(result[0], layout)
    for t in result[1:]:
        if node.target is aten.native_group_norm.default:
            ctx.place(t, (layout[0], *((int(s),) for s in t.shape[1:])))
    return result


@rule("native_group_norm_backward")
def group_norm_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    layout = layout_of(values[1])
    if any(map(is_padded, layout[1:])):
        raise Unsound("over a padded dimension")
    filled = [ctx.filled(v, 0) if is_padded_tensor(v) else v for v in values]
    return gradients(ctx, node, lengths(ctx, filled), {0: layout})
