"""Random numbers of padded tensors: each true element gets the one it would get without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_tpu.compile.buckets import padded_layout as layouts
from torch_tpu.compile.buckets.padded_layout import Extent, Layout, Unsound
from torch_tpu.compile.buckets.symbolic_sizes import Sizes
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.random_bits import Rng, philox

# How many elements a draw has, and how many 32-bit words each takes.
Draw = tuple[Extent, int]


class PaddedRng(Rng):
    """Draws whose places in the stream depend on true sizes: the program advances the generator by no fixed number.

    Attributes:
        draws: what it has drawn.
    """

    def __init__(self, state: Array, sizes: Sizes, layout: Layout | None = None) -> None:
        super().__init__(state)
        self._sizes = sizes
        self._layout = layout
        self._start = hlo.constant(0, torch.uint64)
        self.draws: list[Draw] = []

    @classmethod
    def like(cls, rng: Rng, sizes: Sizes) -> PaddedRng:
        """What draws where `rng` starts."""
        return cls(rng._state, sizes)

    @contextmanager
    def drawing(self, layout: Layout) -> Iterator[None]:
        """Within it, what is drawn has this layout."""
        before, self._layout = self._layout, layout
        try:
            yield
        finally:
            self._layout = before

    def position(self) -> Array:
        return self._state + hlo.stack([hlo.constant(0, torch.uint64), self._start], 0)

    def resumed(self, state: Array) -> PaddedRng:
        return PaddedRng(state, self._sizes, self._layout)

    def skip(self, count: int) -> None:
        self._advance(self._count() if self._layout is not None else count, 1)

    def bits(self, shape: Sequence[int], dtype: torch.dtype = torch.uint32) -> Array:
        seed, start = (hlo.reshape(hlo.slice_(self._state, [i], [i + 1]), ()) for i in range(2))
        counter = start + self._start
        places, count = None, 1
        for size in shape:
            count *= size
        if self._layout is not None:
            places = self._places(shape)
            self._advance(self._count(), dtype.itemsize // 4)
        else:
            self._advance(count, dtype.itemsize // 4)
        return philox(seed, counter, shape, dtype, places) if count else hlo.zeros(shape, dtype)

    def _count(self) -> Extent:
        assert self._layout is not None
        return layouts.size_of(tuple(f for dim in self._layout for f in dim))

    def _advance(self, count: Extent, words: int) -> None:
        self.draws.append((count, words))
        blocks = hlo.divide(self._sizes.true(count) * words + 3, 4)
        self._start = self._start + hlo.convert(blocks, torch.uint64)

    def _places(self, shape: Sequence[int]) -> Array:
        """The row-major place of each element among the true ones; anything in the padding."""
        assert self._layout is not None
        factors = [f for dim in self._layout for f in dim]
        padded = [self._sizes.padded(f) for f in factors]
        if [self._sizes.padded(layouts.size_of(dim)) for dim in self._layout] != list(shape):
            raise Unsound(f"random numbers of shape {list(shape)}")
        place = hlo.constant(0, torch.int64, padded)
        for d, factor in enumerate(factors):
            place = place * self._sizes.true(factor) + hlo.iota(padded, d, torch.int64)
        return hlo.convert(hlo.reshape(place, (place.size,)), torch.uint64)
