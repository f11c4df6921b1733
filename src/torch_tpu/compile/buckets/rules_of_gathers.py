"""Rules of gathers and scatters: indices in the padding become 0, which exists."""

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
from torch_tpu.hlo import structured


@rule("embedding")
def embedding(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    weight, indices, *rest = values
    if padded_of(weight, [0]):
        raise Unsound("of padded rows")
    layout = (*layout_of(indices), *layout_of(weight)[1:])
    rest = [ctx.length(v) for v in rest]
    return ctx.place(ctx.call(aten.embedding.default, [weight, ctx.filled(indices, 0), *rest]), layout)


@rule("embedding_dense_backward")
def embedding_backward(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    grad, indices, *rest = values
    if not all(isinstance(v, int) for v in rest) or rest[2]:
        raise Unsound("with scale_grad_by_freq, or of a padded embedding table")
    rank = indices.dim()
    filled = [ctx.filled(grad, 0, range(rank)), ctx.filled(indices, 0)]
    result = ctx.call(aten.embedding_dense_backward.default, [*filled, *rest])
    return ctx.place(result, ((rest[0],), *layout_of(grad)[rank:]))


def _index(ctx: PaddedTracer, x: torch.Tensor, dim: int, index: torch.Tensor, negative: bool) -> torch.Tensor:
    """An index with 0 in its padding; its bounds are those of the true size."""
    index = ctx.filled(index, 0)
    if not padded_of(x, [dim]):
        return index
    if len(layout_of(x)[dim]) > 1:
        raise Unsound("of a merged dimension")
    size = ctx.sizes.true(layouts.size_of(layout_of(x)[dim]))
    array = hlo.convert(ctx.tracer.read(index), torch.int64)
    wrapped = hlo.select(array < 0, array + size, array) if negative else array
    inside = structured.reduce_and((wrapped >= 0) & (wrapped < size), range(array.ndim))
    ctx.tracer.check(inside, f"index out of range for dimension {dim}", IndexError)
    return ctx.made(wrapped, layout_of(index))


@rule("gather", "index_select")
def gather(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, dim, index, *rest = values
    dim %= x.dim()
    index = _index(ctx, x, dim, index, False)
    if node.target is aten.index_select.default:
        layout = replaced(layout_of(x), dim, layout_of(index)[0] if index.dim() else (1,))
    else:
        layout = layout_of(index)
        for d in range(x.dim()):
            if d != dim and layout[d] != layout_of(x)[d] and max(len(layout[d]), len(layout_of(x)[d])) > 1:
                raise Unsound("of merged dimensions")
    return ctx.place(ctx.call(node.target, [x, dim, index, *rest]), layout)  # type: ignore[arg-type]


@rule("scatter_add", "index_add")
def scatter_add(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    """Adding 0 changes nothing, wherever it is."""
    x, dim, index, source, *rest = values
    dim %= x.dim()
    if node.target is aten.scatter_add.default and any(
        max(len(a), len(b)) > 1 and a != b for a, b in zip(layout_of(index), layout_of(source), strict=True)
    ):
        raise Unsound("of merged dimensions")
    if any(len(dim_) > 1 for d, dim_ in enumerate(layout_of(x)) if d != dim):
        raise Unsound("into merged dimensions")
    values = [x, dim, _index(ctx, x, dim, index, False), _source(ctx, node, index, source), *rest]
    return ctx.place(ctx.call(node.target, values), layout_of(x))  # type: ignore[arg-type]


@rule("scatter.src", "scatter.value")
def scatter(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    """What is written where an index has padding must be padding too."""
    x, dim, index, source = values
    dim %= x.dim()
    tensors = [index, source] if isinstance(source, torch.Tensor) else [index]
    for t in tensors:
        if any(layout_of(t)[d] != layout_of(x)[d] or d == dim for d in padded_of(t, range(t.dim()))):
            raise Unsound("of a padded index")
    if any(len(layout_of(x)[d]) > 1 and layout_of(index)[d] != layout_of(x)[d] for d in range(x.dim())):
        raise Unsound("into merged dimensions")
    values = [x, dim, _index(ctx, x, dim, index, False), source]
    return ctx.place(ctx.call(node.target, values), layout_of(x))  # type: ignore[arg-type]


def _source(ctx: PaddedTracer, node: Node, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What is added, 0 wherever the index or the source has padding."""
    source = ctx.filled(source, 0)
    if node.target is not aten.scatter_add.default:
        return source
    array = ctx.tracer.read(source)
    layout = layout_of(index)
    for d in padded_of(index, range(index.dim())):
        mask = ctx.mask(layout[d])
        if mask.size > source.shape[d]:
            raise Unsound("of an index longer than its source")
        mask = hlo.pad(mask, False, [0], [source.shape[d] - mask.size])
        shape = [mask.size if k == d else 1 for k in range(source.dim())]
        array = hlo.select(hlo.reshape(mask, shape), array, hlo.constant(0, source.dtype))
    return ctx.made(array, layout_of(source))


def _indices(ctx: PaddedTracer, x: torch.Tensor, given: Sequence[Any]) -> tuple[list[Any], Layout]:
    """Indices of `x[…]`, and the layout of what they take."""
    layout, dims = layout_of(x), [d for d, index in enumerate(given) if index is not None]
    if any(given[d].dtype in (torch.bool, torch.uint8) for d in dims):
        raise Unsound("with a mask: the size of the result depends on data")
    indices: list[Any] = [None if index is None else _index(ctx, x, d, index, True) for d, index in enumerate(given)]
    taken = ctx.broadcast([indices[d] for d in dims])
    rest = [dim for d, dim in enumerate(layout) if d not in dims]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    front = dims[0] if together else 0
    return indices, (*rest[:front], *taken, *rest[front:])


@rule("index.Tensor")
def index(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x = values[0]
    indices, layout = _indices(ctx, x, values[1])
    return ctx.place(ctx.call(aten.index.Tensor, [x, indices]), layout)


@rule("index_put", "_unsafe_index_put")
def index_put(ctx: PaddedTracer, node: Node, values: list[Any]) -> torch.Tensor:
    x, given, source, accumulate = values
    indices, layout = _indices(ctx, x, given)
    if any(map(is_padded, layout)) and not accumulate:
        raise Unsound("without accumulating")
    if layouts.broadcast([layout, layout_of(source)]) != layout:
        raise Unsound("of a source with another layout")
    # A source that is broadcast has padding where the index has.
    source = ctx.call(aten.expand.default, [source, list(ctx.shape(layout)), False])
    source = ctx.filled(ctx.place(source, layout), 0)
    return ctx.place(ctx.call(node.target, [x, indices, source, accumulate]), layout_of(x))  # type: ignore[arg-type]
