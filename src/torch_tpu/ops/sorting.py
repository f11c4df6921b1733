"""Order: sort, top-k, mode. NaN counts as the largest value, equal elements keep their order."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.indexing import at_least_1d, elements, read
from torch_tpu.ops.math import radix
from torch_tpu.ops.reduction import first_extreme, index_dtype, keep_dimensions, least_and_greatest
from torch_tpu.ops.scan import number_itself, scan

# Packed into float32 without loss.
NARROW = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.float32}
)

# From this many elements on, looking at the range of integers costs less than it saves on XLA:CPU.
_PACKED_FROM = 2**12

# From this many elements on, a sort of rows is two sorts of half of them.
_HALVED_FROM = 2**15


def ordering_key(x: Array) -> Array:
    """int32 or int64 numbers that compare as PyTorch orders `x`: all NaN equal and largest, -0.0 equal to 0.0."""
    if x.dtype.is_complex:
        raise NotImplementedError(f"{x.dtype} numbers have no order")
    if x.dtype.is_floating_point:
        if x.dtype is not torch.float64:
            x = hlo.convert(x, torch.float32)
        bits = hlo.bitcast(_canonical(x), torch.int64 if x.dtype is torch.float64 else torch.int32)
        return hlo.select(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
    if x.dtype is torch.uint64:
        return hlo.bitcast(x, torch.int64) ^ torch.iinfo(torch.int64).min
    return hlo.convert(x, torch.int64 if x.dtype in (torch.int64, torch.uint32) else torch.int32)


def _canonical(x: Array) -> Array:
    """One bit pattern for every NaN and one for zero."""
    return hlo.select(hlo.is_nan(x), float("nan"), hlo.select(x.eq(0), 0, x))


def sorting_order(x: Array, dim: int, descending: bool = False) -> Array:
    """The positions along `dim` in sorted order; equal elements in their own order."""
    size = x.shape[dim]
    if not x.size:
        return hlo.zeros(x.shape, torch.int32)
    key = ordering_key(x)
    if descending:
        key = hlo.not_(key)
    if radix.suits(key, dim):
        return radix.radix_order(key, dim)
    if key.dtype is torch.int32 and size < 2**31:
        # Key and position in one integer: a sort of plain numbers is several times as fast as one of pairs.
        return _packed_order(hlo.convert(key, torch.int64), dim, 32)

    def order() -> Array:
        return structured.sort([key, hlo.iota(x.shape, dim, index_dtype(size))], dim, lambda a, b, *_: a < b)[1]

    if x.dtype.is_floating_point or x.size < _PACKED_FROM or module.target().platform != "cpu":
        return order()
    # Integers rarely use all of their bits.
    least, greatest = least_and_greatest(key)
    bits = (size - 1).bit_length()
    fits = (greatest - least >= 0) & (greatest - least < 2 ** (63 - bits))
    result = (x.shape, index_dtype(size))
    return structured.conditional(fits, lambda: _packed_order(key - least, dim, bits), order, [result])[0]


def _packed_order(key: Array, dim: int, bits: int) -> Array:
    """The order of keys that leave the highest `bits` of int64 to the positions: one sort of plain numbers."""
    packed = hlo.shift_left(key, bits) | hlo.iota(key.shape, dim, torch.int64)
    packed = sorted_integers(packed, dim)
    return hlo.convert(packed & ((1 << bits) - 1), index_dtype(key.shape[dim]))


def sorted_integers(x: Array, dim: int) -> Array:
    """Integers in ascending order along `dim`: several times as fast as sorting them with their positions."""
    if radix.suits(x, dim):
        return radix.radix_sorted(x, dim)

    def ascending(x: Array) -> Array:
        return structured.sort([x], dim, lambda a, b: a < b, stable=False)[0]

    rows = next((d for d, size in enumerate(x.shape) if d != dim % x.ndim and size > 1), None)
    if rows is None or x.size < _HALVED_FROM or module.target().platform != "cpu":
        return ascending(x)
    # XLA:CPU sorts in one thread, but two sorts at a time.
    half = x.shape[rows] // 2
    parts = hlo.slice_in_dim(x, 0, half, dim=rows), hlo.slice_in_dim(x, half, x.shape[rows], dim=rows)
    return hlo.concatenate([ascending(part) for part in parts], rows)


def take_along(x: Array, positions: Array, dim: int) -> Array:
    """x[..., positions[...], ...] along `dim`; the other dimensions agree."""
    return read(x, elements(positions.shape, dim, positions))


@lower("sort", "sort.stable")
def sort(x: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Array, Array]:
    if not x.ndim:
        return x, hlo.zeros((), torch.int64)
    dim %= x.ndim
    order = sorting_order(x, dim, descending)
    return take_along(x, order, dim), hlo.convert(order, torch.int64)


@lower("topk")
def topk(x: Array, k: int, dim: int, largest: bool, sorted: bool, *, out: list[Spec]) -> list[Array]:
    vector = at_least_1d(x)
    dim %= vector.ndim
    if k == 0 or not x.size or x.dtype not in NARROW:
        order = hlo.slice_in_dim(sorting_order(vector, dim, largest), 0, k, 1, dim)
    else:
        order = top_positions(vector, k, dim, largest)
    results = [take_along(vector, order, dim), hlo.convert(order, torch.int64)]
    return [hlo.reshape(r, spec.shape) for r, spec in zip(results, out, strict=True)]


def top_positions(x: Array, k: int, dim: int, largest: bool) -> Array:
    """By XLA's top-k, which orders float32 by bits: a negative NaN is the smallest, a positive one the largest."""
    value = _canonical(hlo.convert(x, torch.float32))
    if not largest:
        smallest_first = hlo.bitcast(hlo.bitcast(value, torch.int32) ^ -(2**31), torch.float32)
        value = hlo.select(value.eq(0), 0, smallest_first)
    last_to_dim = [*range(dim), x.ndim - 1, *range(dim, x.ndim - 1)]
    dim_to_last = [*range(dim), *range(dim + 1, x.ndim), dim]
    return hlo.transpose(structured.top_k(hlo.transpose(value, dim_to_last), k)[1], last_to_dim)


@lower("mode")
def mode(x: Array, dim: int, keepdim: bool, *, out: list[Spec]) -> list[Array]:
    """The smallest of the most frequent values and its last position."""
    if not x.ndim:
        return number_itself(x)
    x = at_least_1d(x)
    dim %= x.ndim
    order = sorting_order(x, dim)
    ordered = take_along(x, order, dim)
    position = hlo.iota(x.shape, dim)
    start = scan([hlo.select(run_starts(ordered, dim), position, 0)], [0], dim, hlo.maximum)[0]
    end_of_longest = first_extreme(position - start, dim, structured.reduce_max)[1]
    place = take_along(order, keep_dimensions(end_of_longest, x, [dim]), dim)
    results = take_along(x, place, dim), hlo.convert(place, torch.int64)
    return [hlo.reshape(r, spec.shape) for r, spec in zip(results, out, strict=True)]


def run_starts(x: Array, dim: int) -> Array:
    """Whether an element differs from the one before it along `dim`; the first one does."""
    size = x.shape[dim]
    changed = hlo.slice_in_dim(x, 1, size, 1, dim).ne(hlo.slice_in_dim(x, 0, size - 1, 1, dim))
    low = [1 if d == dim else 0 for d in range(x.ndim)]
    return hlo.pad(changed, True, low, [0] * x.ndim)
