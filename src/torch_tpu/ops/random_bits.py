"""`Rng`: counter-based random bits for lowerings. The same (seed, offset) gives the same bits in every mode.

The state is PyTorch's Philox convention: a 64-bit seed (the key) and an offset in elements, a multiple of 4. Element i
of a draw comes from word i mod 4 of Philox counter offset/4 + i div 4, so a shard that knows its position can make
its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array


class Rng:
    """Random bits of one program. `drawn` is by how much the program advances the generator's offset."""

    def __init__(self, state: Array) -> None:
        """`state` is uint64[2]: the seed and the generator's offset divided by 4."""
        self._state = state
        self.drawn = 0

    def position(self) -> Array:
        """The state from which `Rng` repeats the draws that come next."""
        zero = hlo.constant(0, torch.uint64)
        step = hlo.stack([zero, hlo.constant(self.drawn // 4, torch.uint64)], 0)
        return self._state + step

    def skip(self, count: int) -> None:
        """Passes over `count` 32-bit words, which someone draws from `position()`."""
        self.drawn += (count + 3) // 4 * 4

    def bits(self, shape: Sequence[int], dtype: torch.dtype = torch.uint32) -> Array:
        """Uniform random bits, uint32 or uint64."""
        count = math.prod(shape)
        seed, start = (hlo.reshape(hlo.slice_(self._state, [i], [i + 1]), ()) for i in range(2))
        counter = start + self.drawn // 4
        words = dtype.itemsize // 4
        self.drawn += (count * words + 3) // 4 * 4
        if count == 0:
            return hlo.zeros(shape, dtype)
        return structured.philox_bits(seed, counter, shape, dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Uniform in [0, 1): 24 random bits for float32 and narrower, 53 for float64. Never rounds up to 1."""
        if dtype is torch.float64:
            bits = structured_shift(self.bits(shape, torch.uint64), 11)
            return hlo.convert(bits, torch.float64) * 2.0**-53
        bits = structured_shift(self.bits(shape), 8)
        return hlo.convert(bits, torch.float32) * 2.0**-24

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Standard normal by the inverse error function of a uniform in (-1, 1)."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        step = 2.0**-53 if wide is torch.float64 else 2.0**-24
        centred = (self.uniform(shape, wide) + step / 2) * 2.0 - 1.0
        return hlo.erf_inv(centred) * math.sqrt(2.0)


def structured_shift(bits: Array, amount: int) -> Array:
    return hlo.shift_right_logical(bits, amount)
