"""Sorting by digits instead of comparing: for XLA:CPU, whose sort takes 2 to 4 times as long for many elements.

Each pass places the elements by another digit of their keys, the lowest first, and keeps the order of equal ones. Only
as many bits are looked at as the keys differ in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.indexing import added, read, region
from torch_tpu.ops.reduction import least_and_greatest
from torch_tpu.ops.scan import cumulative_sum

# Fewer take as long to compile, a third of a second, as a thousand calls save.
_FROM = 2**14

# Bits of a digit. With more of them a pass writes to more pages of memory than the processor knows by heart, with fewer
# it often waits for the place it has just written.
_DIGIT = 10


def suits(x: Array, dim: int) -> bool:
    """Whether the platform sorts `x` along `dim` faster by digits than by comparing."""
    return module.target().platform == "cpu" and _FROM <= x.shape[dim] < 2**31


def radix_order(key: Array, dim: int) -> Array:
    """The positions (int32) along `dim` of int32 or int64 keys in ascending order, equal ones in their own order."""
    return _for_each_row(_order, key, dim, torch.int32)


def radix_sorted(x: Array, dim: int) -> Array:
    """int32 or int64 numbers in ascending order along `dim`."""
    return _for_each_row(_sorted, x, dim, x.dtype)


def _for_each_row(function: Callable[[Array], Array], x: Array, dim: int, dtype: torch.dtype) -> Array:
    """What `function` makes of each vector along `dim`, which has the same size, one after the other."""
    dim %= x.ndim
    length = x.shape[dim]
    to_last = [*(d for d in range(x.ndim) if d != dim), dim]
    turned = hlo.transpose(x, to_last)
    rows = hlo.reshape(turned, (x.size // length, length))

    def step(i: Array, result: Array) -> Array:
        start = [i, hlo.constant(0, i.dtype)]
        row = hlo.reshape(hlo.dynamic_slice(rows, start, (1, length)), (length,))
        return hlo.dynamic_update_slice(result, hlo.reshape(function(row), (1, length)), start)

    if x.size == length:
        result = function(hlo.reshape(x, (length,)))
    else:
        result = structured.fori_loop(rows.shape[0], step, [hlo.zeros(rows.shape, dtype)])[0]
    return hlo.transpose(hlo.reshape(result, turned.shape), [to_last.index(d) for d in range(x.ndim)])


def _from_least(key: Array) -> tuple[Array, Array, Array]:
    """The keys as unsigned distances from the least, that one, and how many bits the distances have."""
    least, greatest = least_and_greatest(key)
    size = torch.iinfo(key.dtype).bits
    return key - least, least, hlo.convert(size - hlo.count_leading_zeros(greatest - least), torch.int64)


def _sorted(x: Array) -> Array:
    distance, least, bits = _from_least(x)
    return _by_digits(distance, 0, bits) + least


def _order(key: Array) -> Array:
    """Sorts numbers that hold a part of the key above the place: as much of it as fits beside that into 64 bits."""
    size = key.shape[0]
    place_bits = (size - 1).bit_length()
    room = 64 - place_bits
    distance, _, bits = _from_least(key)
    keep = (1 << place_bits) - 1
    packed = hlo.shift_left(hlo.convert(distance, torch.int64), place_bits) | hlo.iota((size,), 0, torch.int64)
    if key.dtype is torch.int32:
        return hlo.convert(_by_digits(packed, place_bits, bits) & keep, torch.int32)

    def by_part(done: Array, packed: Array) -> list[Array]:
        packed = _by_digits(packed, place_bits, hlo.minimum(bits - done, room))
        done = done + room

        def with_next_part() -> Array:
            order = packed & keep
            part = read(distance, region((size,), {0: order}))
            part = hlo.shift_right_logical(part, hlo.broadcast_to(done, part.shape))
            return hlo.shift_left(part, place_bits) | order

        more = structured.conditional(done < bits, with_next_part, lambda: packed, [((size,), torch.int64)])
        return [done, *more]

    start = [hlo.constant(0, torch.int64), packed]
    packed = structured.while_loop(start, lambda done, _: done < bits, by_part)[1]
    return hlo.convert(packed & keep, torch.int32)


def _by_digits(x: Array, low: int, bits: Array) -> Array:
    """A vector in the order of the bits [low, low + bits) of its numbers, two digits a round."""
    end = hlo.convert(bits, x.dtype) + low

    def placed(x: Array, result: Array, shift: Array) -> Array:
        """`x` in the order of one digit, written over `result`."""

        def digit(x: Array) -> Array:
            shifted = hlo.shift_right_logical(x, hlo.broadcast_to(shift, x.shape))
            return hlo.convert(shifted & (2**_DIGIT - 1), torch.int32)

        none, one = hlo.zeros((2**_DIGIT,), torch.int32), hlo.constant(1, torch.int32)
        count = added(none, region(none.shape, {0: digit(x)}), one)
        last = cumulative_sum(count, 0) - count - 1

        def place(i: Array, last: Array, result: Array) -> list[Array]:
            element = hlo.dynamic_slice(x, [i], (1,))
            at = [digit(element).reshape()]
            # The place is read from the new places: if it were read from the old ones, XLA would keep them, and copy
            # all of them for each element.
            last = hlo.dynamic_update_slice(last, hlo.dynamic_slice(last, at, (1,)) + 1, at)
            to = [hlo.dynamic_slice(last, at, (1,)).reshape()]
            return [last, hlo.dynamic_update_slice(result, element, to)]

        return structured.fori_loop(x.size, place, [last, result])[1]

    def two_digits(shift: Array, x: Array, other: Array) -> list[Array]:
        other = placed(x, other, shift)
        return [shift + 2 * _DIGIT, placed(other, x, shift + _DIGIT), other]

    start = [hlo.constant(low, x.dtype), x, hlo.zeros(x.shape, x.dtype)]
    return structured.while_loop(start, lambda shift, *_: shift < end, two_digits)[1]
