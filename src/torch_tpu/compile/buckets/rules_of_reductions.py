"""Rules of reductions, softmax and cumulative operators: padding is set to the identity of the reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_tpu.compile.buckets.padded_layout import Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.rule_table import (
    argument,
    aten,
    dims_of,
    padded_of,
    rule,
    without,
)

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("sum", "sum.dim_IntList", "nansum", "any", "any.dim", "any.dims", "linalg_vector_norm"), 0),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), 0),
    **dict.fromkeys(("prod", "prod.dim_int", "all", "all.dim", "all.dims"), 1),
    **dict.fromkeys(("amax", "max", "max.dim", "argmax", "logsumexp"), "lowest"),
    **dict.fromkeys(("amin", "min", "min.dim", "argmin"), "highest"),
}
_POSITIONS = ("argmax", "argmin", "max.dim", "min.dim")


@rule(*NEUTRAL)
def reduction(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    dims = dims_of(argument(node, values, "dim"), x.dim())
    keepdim = argument(node, values, "keepdim", False)
    name = str(target).removeprefix("aten.").removesuffix(".default")
    padded = padded_of(x, dims)
    if name in _POSITIONS and padded and (len(dims) > 1 or len(layout_of(x)[padded[0]]) > 1):
        raise Unsound("the position of an element over several padded dimensions")
    if name == "linalg_vector_norm" and padded and argument(node, values, "ord", 2) <= 0:
        raise Unsound("a norm to which zeros are not neutral")
    result = ctx.call(target, [ctx.filled(x, NEUTRAL[name], dims), *values[1:]])  # type: ignore[arg-type]
    for t in tree_leaves(result):
        ctx.place(t, without(layout_of(x), dims, keepdim))
    return result


def mean_of(ctx: PaddedTracer, x: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """The mean of the true elements, computed in float32 at least."""
    dtype = dtype or x.dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    total = ctx.call(aten.sum.dim_IntList, [ctx.filled(x, 0, dims), dims, keepdim, wide])
    count = ctx.true_size([layout_of(x)[d] for d in dims])
    result = ctx.call(aten._to_copy.default, [ctx.call(aten.div.Tensor, [total, count]), dtype, *[None] * 5])
    return ctx.place(result, without(layout_of(x), dims, keepdim))


@rule("mean", "mean.dim")
def mean(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    dims = dims_of(argument(node, values, "dim"), values[0].dim())
    return mean_of(ctx, values[0], dims, argument(node, values, "keepdim", False), argument(node, values, "dtype"))


@rule("var.correction", "std.correction", "var_mean.correction")
def variance(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x = values[0]
    dims, keepdim = dims_of(argument(node, values, "dim"), x.dim()), argument(node, values, "keepdim", False)
    centre = mean_of(ctx, x, dims, True)
    layout = layout_of(x)
    squares = ctx.call(aten.square.default, [ctx.call(aten.sub.Tensor, [x, centre, 1])])
    total = ctx.call(aten.sum.dim_IntList, [ctx.filled(ctx.place(squares, layout), 0, dims), dims, keepdim, None])
    count = ctx.call(
        aten.sub.Tensor, [ctx.true_size([layout[d] for d in dims]), argument(node, values, "correction", 1), 1]
    )
    spread = ctx.call(aten.div.Tensor, [total, ctx.call(aten.clamp.default, [count, 0, None])])
    result = without(layout, dims, keepdim)
    if node.target is aten.std.correction:
        spread = ctx.call(aten.sqrt.default, [spread])
    ctx.place(spread, result)
    if node.target is not aten.var_mean.correction:
        return spread
    return spread, ctx.place(ctx.call(aten.reshape.default, [centre, list(spread.shape)]), result)


@rule("_softmax", "_log_softmax")
def softmax(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, dim, *rest = values
    result = ctx.call(node.target, [ctx.filled(x, "lowest", [dim]), dim, *rest])  # type: ignore[arg-type]
    return ctx.place(result, layout_of(x))


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, result, dim, dtype = values
    layout = ctx.broadcast([grad, result])
    filled = [ctx.filled(t, 0, [dim]) for t in (grad, result)]
    return ctx.place(ctx.call(node.target, [*filled, dim, dtype]), layout)  # type: ignore[arg-type]


_FORWARD_ONLY = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


@rule(*_FORWARD_ONLY, "sort", "sort.stable", "topk", "glu", "roll", "argsort", "argsort.stable", "kthvalue")
def along(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    x, target = values[0], node.target
    chosen = argument(node, values, "dims", argument(node, values, "dim", -1))
    layout = layout_of(x)
    for d in padded_of(x, dims_of(chosen, x.dim())):
        if str(target).removeprefix("aten.").removesuffix(".default") not in _FORWARD_ONLY or len(layout[d]) > 1:
            raise Unsound("along a padded dimension")
    result = ctx.call(target, values)  # type: ignore[arg-type]
    for t in tree_leaves(result):
        shape = [layout[d] if is_padded(layout[d]) else (int(s),) for d, s in enumerate(t.shape)]
        ctx.place(t, tuple(shape))
    return result
