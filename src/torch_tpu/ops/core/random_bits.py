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
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype

# Significant bits of the floats.
DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


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

    def resumed(self, state: Array) -> Rng:
        """What draws again from an earlier `position()`."""
        return Rng(state)

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
        return philox(seed, counter, shape, dtype)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Uniform in [0, 1) with as many random bits as `dtype` has digits, so that rounding to it never reaches 1.

        Float16 and bfloat16 come as float32.
        """
        return self._integers(shape, dtype, DIGITS[dtype]) * 2.0 ** -DIGITS[dtype]

    def open_uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Uniform in (0, 1): the odd multiples of a power of two, which lie symmetrically around 1/2."""
        digits = DIGITS[compute_dtype(dtype)]
        return (self._integers(shape, dtype, digits - 1) * 2 + 1) * 2.0**-digits

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """Standard normal by the inverse error function of a uniform in (-1, 1)."""
        return hlo.erf_inv(self.open_uniform(shape, dtype) * 2 - 1) * math.sqrt(2.0)

    def _integers(self, shape: Sequence[int], dtype: torch.dtype, digits: int) -> Array:
        """Integers of `digits` random bits as floats, all of them exact."""
        wide = compute_dtype(dtype)
        bits = self.bits(shape, torch.uint64 if wide is torch.float64 else torch.uint32)
        return hlo.convert(hlo.shift_right_logical(bits, bits.dtype.itemsize * 8 - digits), wide)


def philox(
    seed: Array,
    counter: Array,
    shape: Sequence[int],
    dtype: torch.dtype = torch.uint32,
    places: Array | None = None,
) -> Array:
    """Random bits of Philox 4×32-10 (Salmon et al., SC 2011) with key `seed` and start `counter`, both 0-d uint64.

    Row-major element i is word i mod 4 of counter + i div 4; of 64-bit elements, words 2i and 2i + 1.

    Args:
        places: the i of each element, uint64 in one dimension, where it is not its own place.
    """
    # Every element computes its whole block of four words. So the bits fuse into what uses them, and a million take
    # 2 ms on one core, where XLA's RngBitGenerator takes 60 (and scrambles the key in its own way).
    words = dtype.itemsize // 4
    index = (hlo.iota((math.prod(shape),), 0, torch.uint64) if places is None else places) * words
    block = hlo.shift_right_logical(index, 2) + counter
    zero = hlo.zeros(index.shape, torch.uint32)
    x = [_low(block), _high(block), zero, zero]
    key0, key1 = _low(seed), _high(seed)
    for _ in range(10):
        first, second = (hlo.convert(v, torch.uint64) * m for v, m in ((x[0], 0xD2511F53), (x[2], 0xCD9E8D57)))
        x = [_high(second) ^ x[1] ^ key0, _low(second), _high(first) ^ x[3] ^ key1, _low(first)]
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    place = _low(index) & 3
    if words == 1:
        chosen = hlo.select(place < 2, hlo.select(place.eq(0), x[0], x[1]), hlo.select(place.eq(2), x[2], x[3]))
    else:
        low, high = (hlo.convert(hlo.select(place.eq(0), x[i], x[i + 2]), torch.uint64) for i in range(2))
        chosen = low | hlo.shift_left(high, 32)
    return hlo.reshape(chosen, shape)


def _low(x: Array) -> Array:
    return hlo.convert(x & 0xFFFFFFFF, torch.uint32)


def _high(x: Array) -> Array:
    return hlo.convert(hlo.shift_right_logical(x, 32), torch.uint32)


def high_product(x: Array, y: Array) -> Array:
    """The upper 64 bits of a product of uint64 numbers, from products of their halves."""
    (x1, x0), (y1, y0) = ((hlo.shift_right_logical(v, 32), v & 0xFFFFFFFF) for v in (x, y))
    middle = x1 * y0 + hlo.shift_right_logical(x0 * y0, 32)
    carry = hlo.shift_right_logical(x0 * y1 + (middle & 0xFFFFFFFF), 32)
    return x1 * y1 + hlo.shift_right_logical(middle, 32) + carry
