"""Average and adaptive average pooling: sums over windows, one dimension after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.math import axis
from torch_tpu.ops.math.axis import Band, Table

Ints = Sequence[int]


def per_dimension(value: Ints | int, count: int) -> list[int]:
    """One number for each of `count` dimensions; a single one is for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


# --- average -----------------------------------------------------------------------------------------------------


def average_windows(
    sizes: Ints,
    results: Ints,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    count_include_pad: bool,
    divisor_override: int | None,
) -> tuple[list[Band], list[Table]]:
    """Per dimension, the windows and the number of elements each counts as."""
    bands, counts = [], []
    for size, result, k, s, p in zip(sizes, results, kernel, stride, padding, strict=True):
        start = np.arange(result) * s - p
        end = np.minimum(start + k, size + p)
        band = Band.of_windows(size, start, start + k)
        bands.append(band)
        counts.append(end - start if count_include_pad else band.used.sum(axis=1))
    if divisor_override is not None:
        counts = [np.full(len(c), divisor_override if i == 0 else 1) for i, c in enumerate(counts)]
    return bands, counts


def _scale(x: Array, counts: Sequence[Table]) -> Array:
    """x divided by the product of each dimension's counts."""
    spatial = len(counts)
    total = counts[0]
    for c in counts[1:]:
        total = total[..., None] * c
    divisor = total.reshape(-1)[:1] if total.size and (total == total.reshape(-1)[0]).all() else total
    shape = [1] * spatial if divisor.size == 1 else list(total.shape)
    return x / hlo.constant(divisor.reshape(shape), x.dtype)


def average(x: Array, bands: Sequence[Band], counts: Sequence[Table]) -> Array:
    first = x.ndim - len(bands)
    total = hlo.convert(x, compute_dtype(x.dtype))
    for i, band in reversed(list(enumerate(bands))):
        total = axis.apply(total, first + i, band)
    return _scale(total, counts)


def average_backward(grad: Array, bands: Sequence[Band], counts: Sequence[Table]) -> Array:
    first = grad.ndim - len(bands)
    share = _scale(hlo.convert(grad, compute_dtype(grad.dtype)), counts)
    for i, band in enumerate(bands):
        share = axis.apply(share, first + i, band.adjoint())
    return share


def avg_pool(
    spatial: int,
    x: Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    out: Spec,
) -> Array:
    geometry = per_dimension(kernel_size, spatial), per_dimension(stride or kernel_size, spatial)
    sizes, results = x.shape[-spatial:], out.shape[-spatial:]
    padding = per_dimension(padding, spatial)
    return average(x, *average_windows(sizes, results, *geometry, padding, count_include_pad, divisor_override))


def avg_pool_backward(
    spatial: int,
    grad: Array,
    x: Array,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Array:
    geometry = per_dimension(kernel_size, spatial), per_dimension(stride or kernel_size, spatial)
    sizes, results = x.shape[-spatial:], grad.shape[-spatial:]
    padding = per_dimension(padding, spatial)
    windows = average_windows(sizes, results, *geometry, padding, count_include_pad, divisor_override)
    return average_backward(grad, *windows)


for _spatial in (2, 3):
    lower(f"avg_pool{_spatial}d")(functools.partial(avg_pool, _spatial))
    lower(f"avg_pool{_spatial}d_backward")(functools.partial(avg_pool_backward, _spatial))


# --- adaptive average --------------------------------------------------------------------------------------------


def adaptive_window(size: int, results: int) -> tuple[Table, Table]:
    """Starts and ends of the `results` windows that cover `size` elements."""
    o = np.arange(results)
    return o * size // max(results, 1), -(-(o + 1) * size // max(results, 1))


def _adaptive_windows(sizes: Ints, results: Ints) -> tuple[list[Band], list[Table]]:
    windows = [adaptive_window(size, result) for size, result in zip(sizes, results, strict=True)]
    bands = [Band.of_windows(size, *w) for size, w in zip(sizes, windows, strict=True)]
    return bands, [end - start for start, end in windows]


@lower("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(x: Array, output_size: Ints) -> Array:
    return average(x, *_adaptive_windows(x.shape[-len(output_size) :], output_size))


def adaptive_avg_pool_backward(spatial: int, grad: Array, x: Array) -> Array:
    return average_backward(grad, *_adaptive_windows(x.shape[-spatial:], grad.shape[-spatial:]))


for _spatial in (2, 3):
    lower(f"_adaptive_avg_pool{_spatial}d_backward")(functools.partial(adaptive_avg_pool_backward, _spatial))
