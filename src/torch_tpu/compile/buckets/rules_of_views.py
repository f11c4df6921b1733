"""Rules of operators that move elements: views, slices, joins, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Layout, Unsound, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of, replaced
from torch_tpu.compile.buckets.rule_table import aten, padded_of, rule
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array

_TO_THE_END = 2**63 - 1


def _shape(ctx: PaddedTracer, node: Node, i: int | None = None) -> tuple[layouts.Extent, ...]:
    """The symbolic shape of a node's result, or of one of its results."""
    value = node.meta["val"]
    return tuple(ctx.sizes.extent(size) for size in (value if i is None else value[i]).shape)


# --- views -------------------------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "_reshape_alias")
def view(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x = values[0]
    layout = layouts.viewed(layout_of(x), _shape(ctx, node))
    result = ctx.call(aten.reshape.default, [x, list(ctx.shape(layout))])
    return ctx.place(_own(result, x), layout, uniform=getattr(x, "uniform", False))


def _own(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor object that may get places of its own."""
    return result.view(result.shape) if result is x else result


@rule("permute", "transpose.int", "t", "movedim.int", "numpy_T")
def permute(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x = values[0]
    order = torch.empty(tuple(range(2, 2 + x.dim())), device="meta")  # each size says which dimension it was
    moved = node.target(order, *values[1:])  # type: ignore[operator]
    layout = layout_of(x)
    result = _own(ctx.call(node.target, values), x)  # type: ignore[arg-type]
    return ctx.place(result, tuple(layout[size - 2] for size in moved.shape), uniform=getattr(x, "uniform", False))


@rule("expand")
def expand(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, shape = values[0], _shape(ctx, node)
    layout = layout_of(x)
    new = len(shape) - x.dim()
    dims = [layout[d - new] if d >= new and layout[d - new] != (1,) else (size,) for d, size in enumerate(shape)]
    result = _own(ctx.call(aten.expand.default, [x, list(ctx.shape(tuple(dims))), False]), x)
    return ctx.place(result, tuple(dims), uniform=getattr(x, "uniform", False))


@rule("repeat")
def repeat(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, times = values
    layout: Layout = (*[(1,)] * (len(times) - x.dim()), *layout_of(x))
    dims = []
    for dim, count in zip(layout, times, strict=True):
        count = ctx.sizes.extent(count.expression) if not isinstance(count, int) else count
        if count != 1 and is_padded(dim):
            raise Unsound("of a padded dimension")
        # Copies of a fixed row: the true ones come first.
        dims.append(dim if count == 1 else (layouts.simplified(layouts.size_of(dim) * count),))
    result = ctx.call(aten.repeat.default, [x, [ctx.length(count) for count in times]])
    return ctx.place(result, tuple(dims))


# --- parts of a dimension ----------------------------------------------------------------------------------------


def _part(ctx: PaddedTracer, x: torch.Tensor, dim: int, start: Any, length: layouts.Extent) -> torch.Tensor:
    layout = layout_of(x)
    if length == layouts.size_of(layout[dim]):
        return x
    return ctx.window(x, dim, ctx.start(start, layout[dim]), length)


@rule("slice.Tensor")
def slice_(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, dim, start, _, step = values
    dim %= x.dim()
    length = _shape(ctx, node)[dim]
    if step == 1:
        return _alias(ctx, _part(ctx, x, dim, start, length))
    if not isinstance(step, int) or not (start is None or (isinstance(start, int) and start >= 0)):
        raise Unsound("with a step, from a start that varies")
    if len(layout_of(x)[dim]) > 1:
        raise Unsound("of a merged dimension")
    first, taken = start or 0, ctx.sizes.padded(length)
    last = first + (taken - 1) * step + 1
    array = ctx.tracer.read(x)
    array = hlo.pad(array, 0, [0] * x.dim(), [max(last - s, 0) if d == dim else 0 for d, s in enumerate(x.shape)])
    return ctx.made(hlo.slice_in_dim(array, first, last, step, dim), replaced(layout_of(x), dim, (length,)))


def _alias(ctx: PaddedTracer, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ctx.place(x.view(x.shape), layout_of(x), uniform=getattr(x, "uniform", False))
    return result


@rule("select.int")
def select(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, dim, index = values
    dim %= x.dim()
    row = _part(ctx, x, dim, index, 1)
    layout = layout_of(row)
    return ctx.place(ctx.call(aten.select.int, [row, dim, 0]), (*layout[:dim], *layout[dim + 1 :]))


@rule("split.Tensor", "split_with_sizes", "unbind.int", "chunk")
def split(ctx: PaddedTracer, node: Node, values: list[Any]) -> list[torch.Tensor]:
    x, dim = values[0], values[-1] % values[0].dim()
    parts, at = [], 0
    for i in range(len(node.meta["val"])):
        is_row = node.target is aten.unbind.int
        length = 1 if is_row else _shape(ctx, node, i)[dim]
        start = at if isinstance(at, int) else ctx.sizes.true(at)
        part = _alias(ctx, x if length == layouts.size_of(layout_of(x)[dim]) else ctx.window(x, dim, start, length))
        at = layouts.simplified(at + length)
        layout = layout_of(part)
        if is_row:
            part = ctx.place(ctx.call(aten.select.int, [part, dim, 0]), (*layout[:dim], *layout[dim + 1 :]))
        parts.append(part)
    return parts


@rule("slice_backward", "select_backward")
def part_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, _, dim, start = values[:4]
    shape = _shape(ctx, node)
    dim %= len(shape)
    if node.target is aten.select_backward.default:
        grad = _row(ctx, grad, dim)
    elif values[5] != 1:
        raise Unsound("with steps")
    layout = replaced(layout_of(grad), dim, (shape[dim],))
    if layouts.size_of(layout_of(grad)[dim]) == shape[dim]:
        return _alias(ctx, grad)
    if len(layout_of(grad)[dim]) > 1:
        raise Unsound("of a merged dimension")
    grad = ctx.filled(grad, 0, [dim])
    return _at(ctx, [grad], layout, dim, [ctx.start(start, layout[dim])])


def _row(ctx: PaddedTracer, t: torch.Tensor, dim: int) -> torch.Tensor:
    """`t` with a dimension of 1."""
    layout = layout_of(t)
    return ctx.place(ctx.call(aten.unsqueeze.default, [t, dim]), (*layout[:dim], (1,), *layout[dim:]))


@rule("slice_scatter", "select_scatter")
def part_scatter(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    """Only the true elements of what is written are."""
    x, part, dim, start = values[:4]
    dim %= x.dim()
    if node.target is aten.select_scatter.default:
        part = _row(ctx, part, dim)
    elif values[5] != 1:
        raise Unsound("with steps")
    layout, own = layout_of(x), layout_of(part)
    if replaced(layout, dim, (1,)) != replaced(own, dim, (1,)):
        raise Unsound(f"of {layouts.describe(own)} into {layouts.describe(layout)}")
    if max(len(layout[dim]), len(own[dim])) > 1:
        raise Unsound("of a merged dimension")
    first = ctx.start(start, layout[dim])
    written = ctx.tracer.read(_at(ctx, [part], layout, dim, [first]))
    place = hlo.iota([x.shape[dim] if d == dim else 1 for d in range(x.dim())], dim, torch.int64)
    inside = (place >= first) & (place < ctx.sizes.true(layouts.size_of(own[dim])) + first)
    return ctx.made(hlo.select(inside, written, ctx.tracer.read(x)), layout)


def _at(
    ctx: PaddedTracer, parts: Sequence[torch.Tensor], layout: Layout, dim: int, starts: Sequence[int | Array]
) -> torch.Tensor:
    """Zeros with parts at places of a dimension; a later one may write over an earlier one's padding."""
    shape = list(ctx.shape(layout))
    length = shape[dim]
    shape[dim] += max(part.shape[dim] for part in parts)  # so that no part is moved to make it fit
    array = hlo.zeros(shape, parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        array = ctx.inserted(array, part, dim, start)
    return ctx.made(hlo.slice_in_dim(array, 0, length, dim=dim), layout)


@rule("stack")
def stack(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    tensors, dim = values
    layout = layouts.broadcast([layout_of(t) for t in tensors])
    if any(layout_of(t) != layout for t in tensors):
        raise Unsound("of tensors with different layouts")
    dim %= len(layout) + 1
    return ctx.place(ctx.call(aten.stack.default, [tensors, dim]), (*layout[:dim], (len(tensors),), *layout[dim:]))


@rule("flip")
def flip(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    """The padding comes to lie in front, and is cut off there."""
    x, dims = values
    layout = layout_of(x)
    result = ctx.place(ctx.call(aten.flip.default, [x, dims]), layout)
    for d in padded_of(x, [d % x.dim() for d in dims]):
        size = layouts.size_of(layout[d])
        result = ctx.window(result, d, x.shape[d] - ctx.sizes.true(size), size)
    return result


@rule("cat")
def cat(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    dim = values[1]
    tensors = [t for t in values[0] if tuple(t.shape) != (0,)]
    dim %= tensors[0].dim()
    dtype = node.meta["val"].dtype
    parts = [t if t.dtype is dtype else ctx.place(_converted(ctx, t, dtype), layout_of(t)) for t in tensors]
    others = layouts.broadcast([replaced(layout_of(t), dim, (1,)) for t in parts])
    layout = replaced(others, dim, (_shape(ctx, node)[dim],))
    for t in parts:
        if replaced(layout_of(t), dim, (1,)) != others:
            raise Unsound(f"of {layouts.describe(layout_of(t))} and {layouts.describe(others)}")
    if not any(padded_of(t, [dim]) for t in parts):
        return ctx.place(ctx.call(aten.cat.default, [parts, dim]), layout)
    starts: list[int | Array] = []
    at: layouts.Extent = 0
    for t in parts:
        if len(layout_of(t)[dim]) > 1:
            raise Unsound("of a merged dimension")
        starts.append(at if isinstance(at, int) else ctx.sizes.true(at))
        at = layouts.simplified(at + layouts.size_of(layout_of(t)[dim]))
    return _at(ctx, parts, layout, dim, starts)


def _converted(ctx: PaddedTracer, t: torch.Tensor, dtype: torch.dtype) -> Any:
    return ctx.call(aten._to_copy.default, [t, dtype, *[None] * 5])


@rule("constant_pad_nd")
def pad(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, amounts, value = values
    edges = [(x.dim() - 1 - k, amounts[2 * k], amounts[2 * k + 1]) for k in range(len(amounts) // 2)]
    changed = [d for d, low, high in edges if (low, high) != (0, 0)]
    if not all(isinstance(a, int) for a in amounts):
        raise Unsound("by amounts that vary")
    if any(len(layout_of(x)[d]) > 1 for d in changed):
        raise Unsound("of a merged dimension")
    shape = _shape(ctx, node)
    for d, low, high in edges:
        if padded_of(x, [d]) and min(low, high) < 0:
            if max(low, high) > 0:
                raise Unsound("with negative padding at one end and positive padding at the other")
            x = ctx.window(x, d, -low, shape[d])
            changed.remove(d)
    amounts = [a for d, *both in edges for a in (both if d in changed else (0, 0))]
    layout = tuple((shape[d],) if d in changed else dim for d, dim in enumerate(layout_of(x)))
    filled = ctx.filled(x, value, changed) if isinstance(value, (int, float)) else x
    if filled is x and padded_of(x, changed):
        raise Unsound("with a value that varies")
    return ctx.place(ctx.call(aten.constant_pad_nd.default, [filled, amounts, value]), layout)


# --- elements by their index: indices in the padding become 0, which exists --------------------------------------
