"""Cumulative sums, products, extremes and log-sum-exps along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array, Number
from torch_tpu.hlo.structured import Combine
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.reduction import index_dtype

# So many sequences are scanned side by side; one alone is cut into so many from this length on.
_LANES, _BLOCKS, _BLOCKED_FROM = (8, 4, 2), 4, 2**14

# So many elements of 64 bits at a time: 8 lines of the cache side by side take turns in the same place of it, and
# int64 512×2048 would take 1.6 ms instead of 0.6.
_STRIDE, _LONG, _CHEAP = 8, (torch.int64, torch.float64), (hlo.add, hlo.multiply)
# What libtpu knows of one operand. On others its cost model for TPU7x ends the process ("not modeled").
_MODELED = (hlo.add, hlo.multiply, hlo.maximum, hlo.minimum)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def scan(
    arrays: Sequence[Array], identity: Sequence[Number], dim: int, combine: Combine, *, wide: bool = False
) -> list[Array]:
    """Prefixes of `dim` reduced by `combine`, which must be associative and commutative.

    One window over all earlier elements: XLA for TPU turns that into a scan of logarithmic depth. XLA:CPU makes machine
    code of a loop over the elements, 3 to 30 times as fast as its windows and quicker to compile.

    Args:
        wide: whether the CPU's loop accumulates in twice the precision, as PyTorch's does for sums and products.
    """
    x = arrays[0]
    if not x.ndim or not x.size:
        return list(arrays)
    dim %= x.ndim
    if module.target().platform == "cpu":
        return _scan_in_order(arrays, identity, dim, combine, wide)
    if len(arrays) == 1 and combine not in _MODELED:
        return [_scan_by_doubling(x, identity[0], dim, combine)]
    return structured.reduce_window(
        arrays,
        [hlo.constant(i, a.dtype) for i, a in zip(identity, arrays, strict=True)],
        combine,
        window=[size if d == dim else 1 for d, size in enumerate(x.shape)],
        padding=[(size - 1, 0) if d == dim else (0, 0) for d, size in enumerate(x.shape)],
    )


def _scan_by_doubling(x: Array, identity: Number, dim: int, combine: Combine) -> Array:
    """Adds to each element what is reduced 1, 2, 4, … places before it."""
    reach, length = 1, x.shape[dim]
    while reach < length:
        before = hlo.slice_in_dim(x, 0, length - reach, dim=dim)
        low = [reach if d == dim else 0 for d in range(x.ndim)]
        x = combine(hlo.pad(before, identity, low, [0] * x.ndim), x)
        reach *= 2
    return x


def _scan_in_order(
    arrays: Sequence[Array], identity: Sequence[Number], dim: int, combine: Combine, wide: bool
) -> list[Array]:
    """A loop along `dim`; a step works on several sequences, whose elements lie as near to each other as possible."""
    shape = arrays[0].shape
    length = shape[dim]
    dtypes = [_WIDER.get(a.dtype, a.dtype) if wide else a.dtype for a in arrays]
    count = arrays[0].size // length
    if count == 1 and length >= _BLOCKED_FROM and len(arrays) == 1:
        blocks = _blocks(arrays[0].reshape(length), identity[0])
        before = _exclusive(hlo.convert(blocks, dtypes[0]), identity[0], combine)
        result = _loop([blocks], [before], 1, combine)[0]
        return [hlo.slice_in_dim(result.reshape(result.size), 0, length).reshape(*shape)]
    is_last = shape[dim:] == (length,)
    if is_last and combine in _CHEAP and arrays[0].dtype in _LONG and not length % _STRIDE:
        return [_scan_by_strides(arrays[0].reshape(count * length), length, identity[0], combine).reshape(*shape)]
    lanes = next((n for n in _LANES if count % n == 0), 1)
    if is_last and lanes > 1:
        side_by_side = [a.reshape(lanes, a.size // lanes) for a in arrays]
        starts = [hlo.full((lanes, 1), i, dtype) for i, dtype in zip(identity, dtypes, strict=True)]
        return [a.reshape(*shape) for a in _loop(side_by_side, starts, 1, combine, restart_every=length)]
    to_front = [dim, *(d for d in range(len(shape)) if d != dim)]
    back = [to_front.index(d) for d in range(len(shape))]
    rows = [hlo.transpose(a, to_front) for a in arrays]
    starts = [hlo.full((1, *rows[0].shape[1:]), i, dtype) for i, dtype in zip(identity, dtypes, strict=True)]
    return [hlo.transpose(a, back) for a in _loop(rows, starts, 0, combine)]


def _blocks(x: Array, identity: Number) -> Array:
    size = -(-x.shape[0] // _BLOCKS)
    return hlo.pad(x, identity, [0], [size * _BLOCKS - x.shape[0]]).reshape(_BLOCKS, size)


def _exclusive(blocks: Array, identity: Number, combine: Combine) -> Array:
    """What stands before each block, reduced."""
    totals = structured.reduce_one(blocks, identity, [1], combine)
    before = [hlo.full((1,), identity, blocks.dtype)]
    for i in range(_BLOCKS - 1):
        before.append(combine(before[-1], hlo.slice_in_dim(totals, i, i + 1)))
    return hlo.expand_dims(hlo.concatenate(before, 0), 1)


def _scan_by_strides(x: Array, length: int, identity: Number, combine: Combine) -> Array:
    """Scans a vector anew after every `length` elements, a step for each `_STRIDE` of them."""
    start = hlo.full((1,), identity, x.dtype)

    def step(i: Array, before: Array, result: Array) -> list[Array]:
        at = [i * _STRIDE]
        new = hlo.dynamic_slice(x, at, (_STRIDE,))
        prefixes = [hlo.slice_in_dim(new, 0, 1)]
        for k in range(1, _STRIDE):
            prefixes.append(combine(prefixes[-1], hlo.slice_in_dim(new, k, k + 1)))
        before = hlo.select(hlo.remainder(i, length // _STRIDE).eq(0), start, before)
        # Apart from the rest, so that a step waits for nothing but one number of the last.
        total = hlo.reshape(structured.reduce_one(new, identity, [0], combine), (1,))
        written = hlo.dynamic_update_slice(result, combine(before, hlo.concatenate(prefixes, 0)), at)
        return [combine(before, total), written]

    return structured.fori_loop(x.size // _STRIDE, step, [start, hlo.zeros(x.shape, x.dtype)])[1]


def _loop(
    arrays: Sequence[Array], starts: Sequence[Array], dim: int, combine: Combine, restart_every: int = 0
) -> list[Array]:
    """Scans along `dim` from `starts` (of size 1 there), and anew after every so many elements."""
    zero = hlo.constant(0, torch.int32)
    count = len(arrays)

    def step(i: Array, *carried: Array) -> list[Array]:
        at = [i if d == dim else zero for d in range(arrays[0].ndim)]
        before = list(carried[:count])
        if restart_every:
            anew = hlo.remainder(i, restart_every).eq(0)
            before = [hlo.select(anew, start, b) for start, b in zip(starts, before, strict=True)]
        pairs = zip(arrays, starts, strict=True)
        new = [hlo.convert(hlo.dynamic_slice(a, at, start.shape), start.dtype) for a, start in pairs]
        reduced = combine(*before, *new)
        reduced = [reduced] if isinstance(reduced, Array) else list(reduced)
        written = [
            hlo.dynamic_update_slice(result, hlo.convert(r, result.dtype), at)
            for result, r in zip(carried[count:], reduced, strict=True)
        ]
        return [*reduced, *written]

    results = [hlo.zeros(a.shape, a.dtype) for a in arrays]
    return structured.fori_loop(arrays[0].shape[dim], step, [*starts, *results])[count:]


def cumulative_sum(x: Array, dim: int) -> Array:
    return scan([x], [0], dim, hlo.add, wide=True)[0]


@lower("cumsum")
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None, out: Spec) -> Array:
    return cumulative_sum(_as_numbers(x, out), dim)


@lower("cumprod")
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None, out: Spec) -> Array:
    return scan([_as_numbers(x, out)], [1], dim, hlo.multiply, wide=True)[0]


def _as_numbers(x: Array, out: Spec) -> Array:
    if out.dtype is torch.bool and out.shape:
        raise RuntimeError("cumulative sums and products are not computed in bool; ask for an integer dtype")
    return hlo.convert(x, compute_dtype(out.dtype))


@lower("cummax")
def cummax(x: Array, dim: int) -> list[Array]:
    return _running_extreme(x, dim, hlo.lowest, "GE")


@lower("cummin")
def cummin(x: Array, dim: int) -> list[Array]:
    return _running_extreme(x, dim, hlo.highest, "LE")


@lower("_cummax_helper")
def cummax_helper(x: Array, values: Array, indices: Array, dim: int) -> list[Array]:
    return cummax(x, dim)


@lower("_cummin_helper")
def cummin_helper(x: Array, values: Array, indices: Array, dim: int) -> list[Array]:
    return cummin(x, dim)


def number_itself(x: Array) -> list[Array]:
    """The extreme, median or mode of one number, and its position; the CPU asks for no order of its dtype."""
    return [x, hlo.zeros((), torch.int64)]


def _running_extreme(x: Array, dim: int, identity: Callable[[torch.dtype], Number], direction: str) -> list[Array]:
    """The extreme so far (NaN wins) and the last position that has it: the last that was the extreme when it came."""
    if not x.ndim:
        return number_itself(x)

    def combine(x: Array, i: Array, y: Array, j: Array) -> list[Array]:
        if module.target().platform == "cpu":  # where y always comes later
            from_y = hlo.is_nan(y) | hlo.compare(y, x, direction)
            return [hlo.select(from_y, y, x), hlo.select(from_y, j, i)]
        y_wins = hlo.is_nan(y) | (hlo.compare(y, x, direction) & ~hlo.is_nan(x))
        x_wins = hlo.is_nan(x) | (hlo.compare(x, y, direction) & ~hlo.is_nan(y))
        from_y = y_wins & ((j > i) | ~x_wins)
        return [hlo.select(from_y, y, x), hlo.select(from_y, j, i)]

    positions = hlo.iota(x.shape, dim % x.ndim, index_dtype(x.shape[dim]))
    values, positions = scan([x, positions], [identity(x.dtype), -1], dim, combine)
    return [values, hlo.convert(positions, torch.int64)]


@lower("logcumsumexp", "_logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    wide = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(scan([wide], [-math.inf], dim, _log_add_exp, wide=True)[0], x.dtype)


def _log_add_exp(x: Array, y: Array) -> Array:
    """m + log(exp(x - m) + exp(y - m)), m the one with the larger real part; an infinite m is the result."""
    if not x.dtype.is_complex:
        largest = hlo.maximum(x, y)
        gap = hlo.select(x.eq(y), 0, hlo.negate(hlo.abs_(x - y)))
        return largest + hlo.log1p(hlo.exp(gap))
    largest = hlo.select(hlo.real(x) >= hlo.real(y), x, y)
    smaller = hlo.select(hlo.real(x) >= hlo.real(y), y, x)
    total = largest + hlo.log1p(hlo.exp(smaller - largest))
    return hlo.select(hlo.real(smaller).eq(-math.inf), largest, total)
