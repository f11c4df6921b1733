"""Rules of operators that make tensors: constants, ranges, triangles and random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_tpu.compile.buckets.padded_layout import Unsound
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.rule_table import (
    argument,
    aten,
    given,
    rule,
)
from torch_tpu.compile.buckets.symbolic_sizes import Number
from torch_tpu.hlo import array as hlo
from torch_tpu.ops.core.schema import signature


@rule("native_dropout", "bernoulli", "bernoulli.p", "rand_like", "randn_like", "uniform", "normal_functional")
def random_like(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    layout = layout_of(values[0])
    result = ctx.draw(node.target, values, layout)  # type: ignore[arg-type]
    for t in tree_leaves(result):
        ctx.place(t, layout)
    return result


@rule("rand", "randn")
def random(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    values = given(node, values, "size", list(ctx.shape(layout)))
    return ctx.place(ctx.draw(node.target, values, layout), layout)  # type: ignore[arg-type]


@rule("full", "zeros", "ones", "empty.memory_format", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
@rule("empty_strided", "new_empty_strided")
def constants(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    names = signature(node.target).positions
    shape = list(ctx.shape(layout))
    if node.target in (aten.empty_strided.default, aten.new_empty_strided.default):
        # How it lies in memory means nothing inside of a program.
        dtype = node.meta["val"].dtype
        return ctx.place(ctx.call(aten.full.default, [shape, 0, dtype, None, torch.device("meta"), None]), layout)
    values = given(node, values, "size", shape) if "size" in names else values
    return ctx.place(ctx.call(node.target, values), layout, uniform=True)  # type: ignore[arg-type]


@rule("full_like", "zeros_like", "ones_like", "empty_like")
def constants_like(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    return ctx.place(ctx.call(node.target, values), layout_of(values[0]), uniform=True)  # type: ignore[arg-type]


@rule("arange", "arange.start", "arange.start_step")
def arange(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = ctx.sizes.layout(node.meta["val"].shape)
    start, step = argument(node, values, "start", 0), argument(node, values, "step", 1)
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or isinstance(step, float):
        raise Unsound("with floating-point numbers")
    numbers = [
        ctx.sizes.true(v.expression) if isinstance(v, Number) else hlo.constant(v, torch.int64) for v in (start, step)
    ]
    place = hlo.iota(ctx.shape(layout), 0, torch.int64)
    return ctx.made(hlo.convert(place * numbers[1] + numbers[0], dtype), layout)


@rule("tril", "triu")
def triangle(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    layout = layout_of(values[0])
    if any(len(dim) > 1 for dim in layout[-2:]):
        raise Unsound("of a merged dimension")
    return ctx.place(ctx.call(node.target, values), layout)  # type: ignore[arg-type]
