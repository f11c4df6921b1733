"""How FlexAttention goes over scores: tiles of queries × keys, for each row of tiles only those its BlockMask lists.

A BlockMask names, for each block of queries, the blocks of keys to look at: `kv_indices` those in which `mask_mod`
decides, `full_kv_indices` those in which everything is visible. The lists of several batches and heads are walked side
by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array

# Rows and columns of a tile, at most. Each step of a loop costs some µs, and a tile's scores should stay in the cache.
TILE = (128, 512)


@dataclass(frozen=True)
class Lists:
    """The tensors of a BlockMask: how many blocks each row of blocks lists [B, H, rows], and which [B, H, rows, n]."""

    partial_count: Array
    partial: Array
    full_count: Array | None
    full: Array | None


@dataclass(frozen=True)
class Chosen:
    """One step's tile of keys for each list.

    Attributes:
        tile: which [B, H].
        is_listed: whether the list was not at its end yet [B, H].
        is_full: whether all of it is visible [B, H].
    """

    tile: Array
    is_listed: Array
    is_full: Array


class Tiling:
    """Tiles of one attention.

    Attributes:
        rows, columns: of a tile.
        row_tiles, column_tiles: how many there are.
    """

    def __init__(self, lengths: tuple[int, int], blocks: tuple[int, int], lists: Lists | None) -> None:
        """
        Args:
            lengths: of queries and keys.
            blocks: how many queries and keys belong to a block of the lists.
            lists: None if all is to be looked at.
        """
        (self.rows, self._per_row), (self.columns, self._per_column) = (
            _tile(length, block, most) for length, block, most in zip(lengths, blocks, TILE, strict=True)
        )
        self.lengths = lengths
        self.row_tiles = -(-lengths[0] // self.rows)
        self.column_tiles = -(-lengths[1] // self.columns)
        self.lists = lists

    @property
    def is_single(self) -> bool:
        """Whether there is nothing to loop over."""
        return self.lists is None and self.row_tiles == self.column_tiles == 1

    @property
    def heads(self) -> int:
        """How many heads have lists of their own, or 1."""
        return 1 if self.lists is None else self.lists.partial.shape[1]

    @property
    def is_shared(self) -> bool:
        """Whether all batches and heads look at the same tiles."""
        return self.lists is None or self.lists.partial.shape[:2] == (1, 1)

    def steps(self, row: Array) -> Array:
        """How many steps a row of tiles takes: as many as its longest list."""
        if self.lists is None:
            return hlo.constant(self.column_tiles, torch.int32)
        partial, full = self._counts(row)
        return structured.reduce_max(partial + full, [0, 1]) * self._per_column

    def choose(self, row: Array, step: Array) -> Chosen:
        """The tiles of one step."""
        if self.lists is None:
            everywhere = hlo.full((1, 1), True, torch.bool)
            return Chosen(hlo.broadcast_to(step, (1, 1)), everywhere, hlo.full((1, 1), False, torch.bool))
        partial, full = self._counts(row)
        slot = hlo.broadcast_to(_quotient(step, self._per_column), partial.shape)
        inside = step - _quotient(step, self._per_column) * self._per_column
        is_full = slot >= partial
        block = self._entry(self.lists.partial, row, slot)
        if self.lists.full is not None:
            block = hlo.select(is_full, self._entry(self.lists.full, row, slot - partial), block)
        tile = block * self._per_column + inside
        is_listed = (slot < partial + full) & (tile < self.column_tiles)
        return Chosen(hlo.select(is_listed, tile, 0), is_listed, is_full)

    def _counts(self, row: Array) -> tuple[Array, Array]:
        assert self.lists is not None
        partial = self._of_row(self.lists.partial_count, row)
        if self.lists.full_count is None:
            return partial, hlo.full_like(partial, 0)
        return partial, self._of_row(self.lists.full_count, row)

    def _of_row(self, x: Array, row: Array) -> Array:
        """The entries of a row of tiles' block."""
        starts = _at(x.ndim, 2, _quotient(row, self._per_row))
        sizes = [1 if d == 2 else s for d, s in enumerate(x.shape)]
        return hlo.convert(hlo.squeeze(hlo.dynamic_slice(x, starts, sizes), 2), torch.int32)

    def _entry(self, lists: Array, row: Array, slot: Array) -> Array:
        """Entry `slot` of each list."""
        entries = self._of_row(lists, row)
        chosen = hlo.iota(entries.shape, 2).eq(hlo.expand_dims(slot, 2))
        return structured.reduce_sum(hlo.select(chosen, entries, 0), [2])


def _tile(length: int, block: int, most: int) -> tuple[int, int]:
    """The size of tiles and how many make a block."""
    if block >= length:
        size = min(length, most)
        return size, -(-length // size)
    size = math.gcd(block, most) if block > most else block
    return size, block // size


def _quotient(x: Array, divisor: int) -> Array:
    return x if divisor == 1 else hlo.divide(x, divisor)


def _at(ndim: int, dim: int, start: Array) -> list[Array]:
    zero = hlo.constant(0, torch.int32)
    return [start if d == dim else zero for d in range(ndim)]


# --- tiles of tensors [batch, head, position, width] ---------------------------------------------------------------


def padded(x: Array, length: int, value: float = 0) -> Array:
    """`x` with its positions (dimension 2) filled up to a length."""
    return hlo.pad(x, value, [0] * x.ndim, [length - x.shape[2] if d == 2 else 0 for d in range(x.ndim)])


def rows(x: Array, tile: Array, size: int) -> Array:
    """Tile `tile` of the positions."""
    sizes = [size if d == 2 else s for d, s in enumerate(x.shape)]
    return hlo.dynamic_slice(x, _at(x.ndim, 2, tile * size), sizes)


def set_rows(x: Array, update: Array, tile: Array) -> Array:
    return hlo.dynamic_update_slice(x, update, _at(x.ndim, 2, tile * update.shape[2]))


def columns(x: Array, tiling: Tiling, chosen: Chosen, batch: int, heads: int) -> Array:
    """The chosen tiles of keys or values, [batch or 1, heads or x's heads, columns, width].

    Args:
        batch: of the queries; `x` may have a batch of one.
        heads: of the queries, which may share x's heads.
    """
    if tiling.is_shared:
        return rows(x, hlo.reshape(chosen.tile, ()), tiling.columns)
    return structured.gather(
        _in_tiles(x, tiling),
        _places(x, tiling, chosen, batch, heads),
        offset_dims=[2, 3],
        collapsed_slice_dims=[0, 1, 2],
        start_index_map=[0, 1, 2],
        slice_sizes=[1, 1, 1, tiling.columns, x.shape[3]],
    )


def add_columns(x: Array, update: Array, tiling: Tiling, chosen: Chosen, batch: int, heads: int) -> Array:
    """`x` with something added to the tiles that `columns` would give."""
    if tiling.is_shared:
        tile = hlo.reshape(chosen.tile, ())
        return set_rows(x, rows(x, tile, tiling.columns) + _sum_batch(update, x.shape[0]), tile)
    added = structured.scatter(
        [_in_tiles(x, tiling)],
        _places(x, tiling, chosen, batch, heads),
        [update],
        hlo.add,
        update_window_dims=[2, 3],
        inserted_window_dims=[0, 1, 2],
        scatter_dims_to_operand_dims=[0, 1, 2],
    )
    return hlo.reshape(added[0], x.shape)


def _sum_batch(x: Array, batch: int) -> Array:
    return x if x.shape[0] == batch else hlo.expand_dims(structured.reduce_sum(x, [0]), 0)


def _in_tiles(x: Array, tiling: Tiling) -> Array:
    return hlo.reshape(x, (*x.shape[:2], tiling.column_tiles, tiling.columns, x.shape[3]))


def _places(x: Array, tiling: Tiling, chosen: Chosen, batch: int, heads: int) -> Array:
    """(batch, head, tile) in `x` of each tile [batch, heads with lists of their own or else x's heads, 3]."""
    listed = heads if tiling.heads > 1 else x.shape[1]
    shape = (batch, listed)
    of_batch = hlo.iota(shape, 0) if x.shape[0] > 1 else hlo.zeros(shape, torch.int32)
    of_head = _quotient(hlo.iota(shape, 1), listed // x.shape[1])
    return hlo.stack([of_batch, of_head, hlo.broadcast_to(chosen.tile, shape)], 2)


def spread(x: Array, shape: Sequence[int]) -> Array:
    """A value for each list [B, H] over a tile's scores [batch, heads, rows, columns]."""
    return hlo.broadcast_to(hlo.expand_dims(x, 2, 3), shape)
