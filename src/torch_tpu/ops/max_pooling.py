"""Maximum pooling with positions, adaptive and fractional as well, and its inverse.

A position is a flat index into the spatial dimensions. As on the CPU, the first of equal elements wins, a NaN wins over
everything (the last NaN of a window), and a window of nothing but -inf takes its first element inside the input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.math import axis
from torch_tpu.ops.math.axis import Table
from torch_tpu.ops.pooling import adaptive_window, per_dimension

Ints = Sequence[int]
Pair = tuple[Array, Array]


def _position_dtype(sizes: Ints) -> torch.dtype:
    return torch.int32 if math.prod(sizes) < 2**31 else torch.int64


def _max_of_taps(x: Array, position: Array | None, initial: Array, dim: int, columns: Table, stride: int) -> Pair:
    """The maximum over each row of `columns`, tap after tap."""
    low, high = max(0, -int(columns.min())), max(0, int(columns.max()) + 1 - x.shape[dim])
    edges = ([low if d == dim else 0 for d in range(x.ndim)], [high if d == dim else 0 for d in range(x.ndim)])
    padded = hlo.pad(x, hlo.lowest(x.dtype), *edges)
    padded_position = None if position is None else hlo.pad(position, 0, *edges)
    shape = [len(columns) if d == dim else size for d, size in enumerate(x.shape)]
    best, best_position = hlo.full(shape, hlo.lowest(x.dtype), x.dtype), hlo.broadcast_to(initial, shape)
    for t in range(columns.shape[1]):
        value = axis.take(padded, dim, columns[:, t] + low)
        own = hlo.broadcast_to(_along(columns[:, t] * stride, x.ndim, dim, initial.dtype), shape)
        if padded_position is not None:
            own = own + axis.take(padded_position, dim, columns[:, t] + low)
        better = (value > best) | hlo.is_nan(value)
        best, best_position = hlo.select(better, value, best), hlo.select(better, own, best_position)
    return best, best_position


def _max_of_windows(value: Array, position: Array, dim: int) -> Pair:
    """The maximum over a dimension, in whatever order it is reduced."""

    def later(a: Array, i: Array, b: Array, j: Array) -> Pair:
        a_is_nan, b_is_nan = hlo.is_nan(a), hlo.is_nan(b)
        among_numbers = (b > a) | (b.eq(a) & (j < i))
        take_b = hlo.select(a_is_nan, b_is_nan & (j > i), b_is_nan | among_numbers)
        return hlo.select(take_b, b, a), hlo.select(take_b, j, i)

    lowest = hlo.constant(hlo.lowest(value.dtype), value.dtype)
    last = hlo.constant(hlo.highest(position.dtype), position.dtype)
    best, best_position = structured.reduce([value, position], [lowest, last], [dim], later)
    return best, best_position


def _along(table: Table, ndim: int, dim: int, dtype: torch.dtype) -> Array:
    return hlo.constant(table.reshape([-1 if d == dim else 1 for d in range(ndim)]), dtype)


def max_over_windows(x: Array, windows: Sequence[Table]) -> Pair:
    """Maxima and positions over the last dimensions, the last one first.

    Args:
        windows: for each of these dimensions the columns (results, window) that a result looks at. Columns outside of
            the input don't exist; a column may occur twice.
    """
    sizes = x.shape[-len(windows) :]
    dtype = _position_dtype(sizes)
    position, stride = None, 1
    # Where the window's first element lies, for a window of nothing but -inf.
    initial = np.zeros([1] * len(windows), np.int64)
    for i in reversed(range(len(windows))):
        dim, columns = x.ndim - len(windows) + i, windows[i]
        first = np.where(columns >= 0, columns, columns.max(initial=0)).min(axis=1) * stride
        initial = initial + first.reshape([-1 if d == i else 1 for d in range(len(windows))])
        if columns.shape[1] <= axis.UNROLLED or columns.min() < 0 or columns.max() >= sizes[i]:
            x, position = _max_of_taps(x, position, hlo.constant(initial, dtype), dim, columns, stride)
        else:
            own = _along(np.arange(sizes[i]) * stride, x.ndim, dim, dtype)
            position = hlo.broadcast_to(own, x.shape) if position is None else position + own
            shape = [*x.shape[:dim], *columns.shape, *x.shape[dim + 1 :]]
            x, position = (axis.take(a, dim, columns.reshape(-1)).reshape(*shape) for a in (x, position))
            x, position = _max_of_windows(x, position, dim + 1)
        stride *= sizes[i]
    assert position is not None
    return x, position


# --- regular windows ---------------------------------------------------------------------------------------------


def max_pool(
    spatial: int,
    x: Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints | int,
    dilation: Ints | int,
    ceil_mode: bool,
    out: list[Spec],
) -> Pair:
    options = (kernel_size, stride or kernel_size, padding, dilation)
    windows = [
        np.arange(result)[:, None] * s - p + np.arange(k) * d
        for result, k, s, p, d in zip(
            out[0].shape[-spatial:], *(per_dimension(o, spatial) for o in options), strict=True
        )
    ]
    return max_over_windows(x, windows) if math.prod(out[0].shape) else _nothing(out)


def max_pool_backward(
    spatial: int,
    grad: Array,
    x: Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: Array,
) -> Array:
    kernel = per_dimension(kernel_size, spatial)
    apart = per_dimension(stride or kernel_size, spatial) == kernel and grad.size > 0
    if apart and not any(per_dimension(padding, spatial)) and all(d == 1 for d in per_dimension(dilation, spatial)):
        return _over_tiles(grad, indices, kernel, x.shape)
    return add_at(grad, indices, spatial, x.shape)


def _over_tiles(grad: Array, indices: Array, kernel: Ints, shape: Ints) -> Array:
    """The gradient where windows lie side by side: each element compares its position with that of its window."""
    spatial = len(kernel)
    leading, sizes, results = list(shape[:-spatial]), shape[-spatial:], grad.shape[-spatial:]
    tiles = [*leading, *(n for pair in zip(results, kernel, strict=True) for n in pair)]
    dims = [*range(len(leading)), *(len(leading) + 2 * i for i in range(spatial))]
    tiled = [r * k for r, k in zip(results, kernel, strict=True)]
    missing = [0] * len(leading) + [size - t for size, t in zip(sizes, tiled, strict=True)]

    def spread(x: Array, beyond: int) -> Array:
        x = hlo.broadcast_in_dim(x, tiles, dims).reshape(*leading, *tiled)
        return hlo.pad(x, beyond, [0] * len(shape), missing)

    dtype = _position_dtype(sizes)
    position = hlo.iota((math.prod(sizes),), 0, dtype).reshape(*sizes)
    return hlo.select(spread(hlo.convert(indices, dtype), -1).eq(position), spread(grad, 0), 0)


for _spatial in (2, 3):
    lower(f"max_pool{_spatial}d_with_indices")(functools.partial(max_pool, _spatial))
    lower(f"max_pool{_spatial}d_with_indices_backward")(functools.partial(max_pool_backward, _spatial))


def _nothing(out: list[Spec]) -> Pair:
    return hlo.zeros(out[0].shape, out[0].dtype), hlo.zeros(out[1].shape, out[1].dtype)


def _planes(x: Array, spatial: int) -> Array:
    """All leading dimensions as one, all spatial ones as another."""
    return x.reshape(math.prod(x.shape[:-spatial]), math.prod(x.shape[-spatial:]))


def _scatter(values: Array, indices: Array, spatial: int, shape: Ints, combine: structured.Combine) -> Array:
    """`values` put at flat spatial `indices` of zeros of `shape`."""
    planes, positions = _planes(values, spatial), _planes(indices, spatial)
    scattered = structured.scatter(
        [hlo.zeros((planes.shape[0], math.prod(shape[-spatial:])), values.dtype)],
        hlo.expand_dims(hlo.convert(positions, _position_dtype(shape[-spatial:])), -1),
        [planes],
        combine,
        update_window_dims=[],
        inserted_window_dims=[1],
        scatter_dims_to_operand_dims=[1],
        input_batching_dims=[0],
        scatter_indices_batching_dims=[0],
    )
    return scattered[0].reshape(*shape)


def add_at(grad: Array, indices: Array, spatial: int, shape: Ints) -> Array:
    """Each element of `grad` added at its position: the gradient of every maximum pooling."""
    if not grad.size:
        return hlo.zeros(shape, grad.dtype)
    return _scatter(hlo.convert(grad, compute_dtype(grad.dtype)), indices, spatial, shape, hlo.add)


# --- adaptive windows --------------------------------------------------------------------------------------------


@lower("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Array, output_size: Ints, out: list[Spec]) -> Pair:
    windows = []
    for size, result in zip(x.shape[-len(output_size) :], output_size, strict=True):
        start, end = adaptive_window(size, result)
        width = int((end - start).max(initial=1))
        windows.append(np.minimum(start[:, None] + np.arange(width), end[:, None] - 1))
    return max_over_windows(x, windows) if math.prod(out[0].shape) else _nothing(out)


@lower("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad: Array, x: Array, indices: Array) -> Array:
    return add_at(grad, indices, 2, x.shape)


@lower("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad: Array, x: Array, indices: Array) -> Array:
    return add_at(grad, indices, 3, x.shape)


# --- fractional windows ------------------------------------------------------------------------------------------


def _fractional_starts(sample: Array, size: int, kernel: int, results: int) -> Array:
    """Starts (plane, result) of windows (Graham, arXiv:1412.6071), from one random number in [0, 1) per plane."""
    last = hlo.full((sample.shape[0], 1), size - kernel, torch.int32)
    if results == 1:
        return last
    alpha = hlo.constant((size - kernel) / (results - 1), sample.dtype)
    column = hlo.expand_dims(sample, 1)
    places = hlo.convert((hlo.iota((1, results - 1), 1, sample.dtype) + column) * alpha, torch.int32)
    return hlo.concatenate([places - hlo.convert(column * alpha, torch.int32), last], 1)


def _take_rows(x: Array, rows: Array) -> Array:
    """x (plane, row, rest) at rows (plane, n)."""
    return structured.gather(
        x,
        hlo.expand_dims(rows, -1),
        offset_dims=[2],
        collapsed_slice_dims=[1],
        start_index_map=[1],
        slice_sizes=[1, 1, x.shape[2]],
        operand_batching_dims=[0],
        start_indices_batching_dims=[0],
    )


def fractional_max_pool(
    spatial: int, x: Array, kernel_size: Ints, output_size: Ints, random_samples: Array, out: list[Spec]
) -> Pair:
    sizes, planes = x.shape[-spatial:], math.prod(x.shape[:-spatial])
    if not planes:
        return hlo.zeros(out[0].shape, out[0].dtype), hlo.zeros(out[1].shape, out[1].dtype)
    kernel, results = per_dimension(kernel_size, spatial), per_dimension(output_size, spatial)
    value = x.reshape(planes, *sizes)
    position = hlo.broadcast_to(hlo.iota((math.prod(sizes),), 0, _position_dtype(sizes)).reshape(*sizes), value.shape)
    # They may be for more samples than there are.
    samples = hlo.slice_in_dim(random_samples.reshape(-1, spatial), 0, planes, dim=0)
    for i, (size, k, n) in enumerate(zip(sizes, kernel, results, strict=True)):
        # The 2-d operator's samples are for the width first, the 3-d one's for the depth.
        sample = hlo.slice_in_dim(samples, *((1 - i, 2 - i) if spatial == 2 else (i, i + 1)), dim=1).reshape(planes)
        starts = _fractional_starts(sample, size, k, n)
        rows = (hlo.expand_dims(starts, 2) + hlo.iota((1, 1, k), 2)).reshape(planes, n * k)

        def windows(a: Array, i: int = i, rows: Array = rows, n: int = n, k: int = k) -> Array:
            front = hlo.transpose(a, (0, i + 1, *(d for d in range(1, a.ndim) if d != i + 1)))
            taken = _take_rows(front.reshape(planes, a.shape[i + 1], -1), rows)
            return taken.reshape(planes, n, k, *front.shape[2:])

        best = _max_of_windows(windows(value), windows(position), 2)
        back = [0, *range(2, i + 2), 1, *range(i + 2, spatial + 1)]
        value, position = (hlo.transpose(a, back) for a in best)
    return value.reshape(*out[0].shape), position.reshape(*out[1].shape)


def fractional_max_pool_backward(
    spatial: int, grad: Array, x: Array, kernel_size: Ints, output_size: Ints, indices: Array
) -> Array:
    return add_at(grad, indices, spatial, x.shape)


for _spatial in (2, 3):
    lower(f"fractional_max_pool{_spatial}d")(functools.partial(fractional_max_pool, _spatial))
    lower(f"fractional_max_pool{_spatial}d_backward")(functools.partial(fractional_max_pool_backward, _spatial))


# --- inverse -----------------------------------------------------------------------------------------------------


@lower("max_unpool2d")
def max_unpool2d(x: Array, indices: Array, output_size: Ints, out: Spec, check: Check) -> Array:
    return _unpool(x, indices, 2, out, check)


@lower("max_unpool3d")
def max_unpool3d(
    x: Array, indices: Array, output_size: Ints, stride: Ints, padding: Ints, out: Spec, check: Check
) -> Array:
    return _unpool(x, indices, 3, out, check)


def _unpool(x: Array, indices: Array, spatial: int, out: Spec, check: Check) -> Array:
    if not x.size:
        return hlo.zeros(out.shape, out.dtype)
    valid = (indices >= 0) & (indices < math.prod(out.shape[-spatial:]))
    check(structured.reduce_and(valid, range(valid.ndim)), "Found an invalid max index")
    return _scatter(x, indices, spatial, out.shape, lambda old, new: new)
