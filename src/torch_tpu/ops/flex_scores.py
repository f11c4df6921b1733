"""What FlexAttention's forward and gradient have in common: products by heads, and functions of scores tile by tile.

`score_mod` and `mask_mod` are graphs of scalars; `vmap` makes them graphs of tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import NoLowering
from torch_tpu.ops.math import flex_tiles
from torch_tpu.ops.math.flex_tiles import Chosen, Lists, Tiling, spread
from torch_tpu.ops.matmul import matrix_product
from torch_tpu.ops.tracing.subgraph import GraphTracer, constants, tensor
from torch_tpu.ops.tracing.tracer import Tracer

# The block size of what PyTorch passes for "no BlockMask".
_NO_BLOCKS = 1 << 30


@dataclass
class Attention:
    """The arguments that forward and gradient share.

    Attributes:
        score_buffers, mask_buffers: what the graphs capture, as the graph's own tensors.
    """

    tracer: Tracer
    query: Array
    key: Array
    value: Array
    score_mod: GraphModule
    mask_mod: GraphModule
    scale: float
    tiling: Tiling
    score_buffers: Sequence[Any]
    mask_buffers: Sequence[Any]

    @classmethod
    def of(
        cls,
        tracer: Tracer,
        tensors: Sequence[torch.Tensor],
        score_mod: GraphModule,
        block_mask: Sequence[Any],
        scale: Any,
        score_buffers: Sequence[Any],
        mask_buffers: Sequence[Any],
    ) -> Attention:
        query, key, value = (tracer.read(t) for t in tensors)
        if not isinstance(scale, (int, float)):
            raise NoLowering("flex_attention whose scale is computed by the program")
        *_, row_block, column_block, mask_mod = block_mask
        lists = None
        if row_block != _NO_BLOCKS or column_block != _NO_BLOCKS:
            given = (None if t is None else tracer.read(t) for t in block_mask[2:6])
            lists = Lists(*given)  # type: ignore[arg-type]
        tiling = Tiling((query.shape[2], key.shape[2]), (row_block, column_block), lists)
        key, value = (flex_tiles.padded(x, tiling.column_tiles * tiling.columns) for x in (key, value))
        query = flex_tiles.padded(query, tiling.row_tiles * tiling.rows)
        # Memory nobody wrote gets its zeros here, not inside of a loop.
        for graph in (score_mod, mask_mod):
            for t in [*score_buffers, *mask_buffers, *(tracer.constants[id(c)] for c in constants(graph))]:
                if isinstance(t, torch.Tensor):
                    tracer.read(t)
        return cls(tracer, query, key, value, score_mod, mask_mod, scale, tiling, score_buffers, mask_buffers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores."""
        return torch.float64 if self.query.dtype is torch.float64 else torch.float32

    @property
    def heads(self) -> tuple[int, int]:
        """Batch size and number of heads of the queries."""
        return self.query.shape[0], self.query.shape[1]

    def columns(self, x: Array, chosen: Chosen) -> Array:
        """A tile of keys or values [batch, heads it has, columns, width]."""
        tile = flex_tiles.columns(x, self.tiling, chosen, *self.heads)
        return hlo.broadcast_to(tile, (self.heads[0], *tile.shape[1:]))

    def product(self, x: Array, y: Array) -> Array:
        """x @ y for each head of `x`, which share the heads of `y`."""
        grouped = hlo.reshape(x, (*y.shape[:2], -1, x.shape[3]))
        return hlo.reshape(matrix_product(grouped, y), (*x.shape[:3], y.shape[3]))

    def product_of_rows(self, x: Array, y: Array, heads: int) -> Array:
        """xᵀ @ y for each of so many heads, summed over the queries' heads that share it."""
        x, y = (hlo.reshape(a, (a.shape[0], heads, -1, a.shape[3])) for a in (x, y))
        return matrix_product(hlo.transpose(x, [0, 1, 3, 2]), y)

    def scores(self, query: Array, key: Array) -> Array:
        raw = self.product(query, hlo.transpose(key, [0, 1, 3, 2]))
        return hlo.convert(raw, self.dtype) * self.scale

    def indices(self, row: Array, chosen: Chosen) -> Indices:
        return Indices(self, row, chosen)


class Indices:
    """Where a tile's scores stand, and the graphs of scalars applied to them."""

    def __init__(self, attention: Attention, row: Array, chosen: Chosen) -> None:
        self.attention = attention
        self.chosen = chosen
        tiling = attention.tiling
        self.shape = (*attention.heads, tiling.rows, tiling.columns)
        self.row = row * tiling.rows + hlo.iota((tiling.rows,), 0)
        # For each list of tiles.
        self.column = hlo.expand_dims(chosen.tile * tiling.columns, 2) + hlo.iota((1, 1, tiling.columns), 2)

    def visible(self) -> Array:
        """Which scores count."""
        is_listed = spread(self.chosen.is_listed, self.shape)
        inside = hlo.broadcast_to(hlo.expand_dims(self.column < self.attention.tiling.lengths[1], 2), self.shape)
        visible = is_listed & inside
        mask = self._map(self.attention.mask_mod, [], [], self.attention.mask_buffers)[0]
        if mask is None:
            return visible
        return visible & (mask | spread(self.chosen.is_full, self.shape))

    def modified(self, scores: Array) -> Array:
        """`score_mod` of scores."""
        modified = self._map(self.attention.score_mod, [scores], [], self.attention.score_buffers)[0]
        return scores if modified is None else hlo.convert(modified, scores.dtype)

    def gradients(self, joint: GraphModule, scores: Array, grad: Array) -> list[Array | None]:
        """The gradient of `score_mod`: that of the scores, then those of the buffers, None where there is none."""
        results = self._map(joint, [scores], [grad], self.attention.score_buffers, gradient=True)
        return [results[0], *results[5:]]

    def _map(
        self,
        graph: GraphModule,
        before: Sequence[Array],
        after: Sequence[Array],
        buffers: Sequence[Any],
        *,
        gradient: bool = False,
    ) -> list[Array | None]:
        """A graph's results for (*before, batch, head, query, key, *after, *buffers); one None if it does nothing.

        Positions in the padding count as the last ones: the graphs index buffers with them.
        """
        if not gradient and _does_nothing(graph):
            return [None]
        tracer, tiling = self.attention.tracer, self.attention.tiling
        columns = hlo.minimum(self.column, tiling.lengths[1] - 1)
        own_batch, own_head = (size > 1 for size in columns.shape[:2])
        places = [
            hlo.iota((self.shape[0],), 0),
            hlo.iota((self.shape[1],), 0),
            hlo.minimum(self.row, tiling.lengths[0] - 1),
            hlo.squeeze(columns, *(d for d, is_own in enumerate((own_batch, own_head)) if not is_own)),
        ]
        scalars = GraphTracer(tracer, graph)
        function = _mapped(scalars, len(before), len(after), len(buffers), (own_batch, own_head), gradient)
        with _without_checks(tracer):
            results = function(*(tensor(tracer, a) for a in [*before, *places, *after]), *buffers)
        return [tracer.read(r) if isinstance(r, torch.Tensor) else None for r in results]


def _mapped(graph: GraphTracer, before: int, after: int, buffers: int, own: tuple[bool, bool], gradient: bool) -> Any:
    """A function of scalars as one of tiles [batch, head, query, key].

    Args:
        own: whether each batch and each head has key positions of its own.
        gradient: whether it is the gradient of `score_mod`; what it returns for buffers is summed over the tile.
    """
    function: Any = lambda *args: tuple(tree_leaves(graph.run(*args), lambda x: x is None))  # noqa: E731
    out_dims: Any = (0, *(None,) * (4 + buffers)) if gradient else (0,)
    # From the innermost dimension outwards: where batch, head, query and key position have it.
    by_batch, by_head = (0 if is_own else None for is_own in own)
    for places in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, by_head), (0, None, None, by_batch)):
        in_dims = (*(0,) * before, *places, *(0,) * after, *(None,) * buffers)
        function = torch.vmap(function, in_dims=in_dims, out_dims=out_dims)
    return function


def _does_nothing(graph: GraphModule) -> bool:
    """Whether it returns its first argument, or true: what PyTorch passes for a missing `score_mod` or `mask_mod`."""
    result = graph.graph.output_node().args[0]
    first = next(iter(graph.graph.find_nodes(op="placeholder")))
    if result is first:
        return True
    return (
        isinstance(result, torch.fx.Node)
        and result.target in (torch.ops.aten.full.default, torch.ops.aten.new_ones.default)
        and (result.target is torch.ops.aten.new_ones.default or result.args[1] is True)
    )


@contextlib.contextmanager
def _without_checks(tracer: Tracer) -> Iterator[None]:
    """Masked scores may index out of bounds; indices are clamped, as on other devices."""
    before, tracer.with_checks = tracer.with_checks, False
    try:
        yield
    finally:
        tracer.with_checks = before
