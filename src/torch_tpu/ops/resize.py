"""Resizing (`interpolate`): nearest, linear, cubic and antialiased, in one to three dimensions, and their gradients.

Every mode is separable: along each dimension a banded matrix, whose transpose gives the gradient. The matrices are made
here from sizes and scales with the CPU's formulas (ATen/native/UpSample.h), in float32 for all but float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import lower
from torch_tpu.ops.math import axis
from torch_tpu.ops.math.axis import Band, Table

Ints = Sequence[int]
# The matrix that maps a size to another: (size, results, align_corners, scale, float type).
Interpolation = Callable[[int, int, bool, float | None, Any], Band]


def _step(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Any:
    """Distance between two results' places in the input."""
    if align_corners:
        return real(size - 1) / real(results - 1) if results > 1 else real(0)
    return real(1.0 / scale) if scale is not None and scale > 0 else real(size) / real(results)


def _places(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Table:
    """Where each result lies in the input, in units of elements."""
    step = _step(size, results, align_corners, scale, real)
    o = np.arange(results, dtype=real)
    return step * o if align_corners else step * (o + real(0.5)) - real(0.5)


def _nearest(size: int, results: int, offset: float, scale: float | None) -> Band:
    step = _step(size, results, False, scale, np.float32)
    columns = np.floor((np.arange(results, dtype=np.float32) + np.float32(offset)) * step).astype(np.int64)
    if not offset and results in (size, 2 * size):
        columns = np.arange(results) // (results // size)
    columns = np.minimum(columns, size - 1)[:, None]
    return Band.of_taps(size, columns, np.ones(columns.shape))


def nearest(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Band:
    return _nearest(size, results, 0.0, scale)


def nearest_exact(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Band:
    return _nearest(size, results, 0.5, scale)


def linear(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Band:
    if size == results:
        return Band.of_taps(size, np.arange(size)[:, None], np.ones((size, 1)))
    place = np.maximum(_places(size, results, align_corners, scale, real), 0)
    left = np.minimum(place.astype(np.int64), size - 1)
    weight = np.clip(place - left.astype(real), 0, 1)
    right = np.minimum(left + 1, size - 1)
    return Band.of_taps(size, np.stack([left, right], 1), np.stack([1 - weight, weight], 1))


def _keys(x: Table, a: float) -> Table:
    """The cubic convolution kernel (Keys, IEEE Trans. ASSP 29, 1981)."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def cubic(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Band:
    place = _places(size, results, align_corners, scale, real)
    left = np.minimum(np.floor(place).astype(np.int64), size - 1)
    weight = np.clip(place - left.astype(real), 0, 1)
    offsets = np.arange(-1, 3)
    columns = np.clip(left[:, None] + offsets, 0, size - 1)
    return Band.of_taps(size, columns, _keys(weight[:, None] - offsets.astype(real), -0.75))


def _antialiased(taps: int, filter: Callable[[Table], Table]) -> Interpolation:
    """A filter of support taps/2 results, widened to taps/2 steps where the image shrinks (as Pillow does)."""

    def interpolation(size: int, results: int, align_corners: bool, scale: float | None, real: Any) -> Band:
        step = _step(size, results, align_corners, scale, real)
        widen = max(step, real(1))
        support = real(taps * 0.5) * widen
        center = step * (np.arange(results, dtype=real) + real(0.5))
        start = np.maximum((center - support + real(0.5)).astype(np.int64), 0)
        end = np.minimum((center + support + real(0.5)).astype(np.int64), size)
        band = Band.of_windows(size, start, end)
        columns = band.start[:, None] + np.arange(band.used.shape[1])
        weights = filter((columns - center[:, None] + real(0.5)) / widen) * band.used
        return Band(size, start, weights / weights.sum(axis=1, keepdims=True), band.used)

    return interpolation


def _triangle(x: Table) -> Table:
    return np.maximum(1 - np.abs(x), 0)


def _lanczos3(x: Table) -> Table:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _bands(
    mode: Interpolation, sizes: Ints, results: Ints, align_corners: bool, scales: Sequence[float | None], x: Array
) -> list[Band]:
    real = np.float64 if x.dtype in (torch.float64, torch.uint8) else np.float32
    return [
        mode(size, count, align_corners, scale, real) for size, count, scale in zip(sizes, results, scales, strict=True)
    ]


def _resized_bytes(x: Array, dim: int, band: Band) -> Array:
    """Bytes to bytes in fixed point, as the CPU resizes images: weights have as many bits as fit 16-bit integers."""
    bits = 0
    while bits < 22 and int(0.5 + band.weights.max(initial=0) * 2 ** (bits + 1)) < 2**15:
        bits += 1
    weights = np.trunc(band.weights * 2**bits + np.copysign(0.5, band.weights)).astype(np.int32)
    total = axis.apply(x, dim, Band(band.size, band.start, weights, band.used)) + 2 ** (bits - 1)
    return hlo.clamp(0, hlo.shift_right_arithmetic(total, bits), 255)


def resize(mode: Interpolation, x: Array, output_size: Ints, *options: Any) -> Array:
    align_corners, scales = _options(len(output_size), options)
    first = x.ndim - len(output_size)
    if min(*x.shape[first:], *output_size) < 1:
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got {x.shape[first:]} and {tuple(output_size)}"
        )
    bands = _bands(mode, x.shape[first:], output_size, align_corners, scales, x)
    picks = all(band.weights.shape[1] == 1 for band in bands)
    if x.dtype is torch.uint8 and not picks:
        result, apply = hlo.convert(x, torch.int32), _resized_bytes
    else:
        result, apply = x if picks else hlo.convert(x, compute_dtype(x.dtype)), axis.apply
    for i, band in reversed(list(enumerate(bands))):
        result = apply(result, first + i, band)
    return result


def resize_backward(mode: Interpolation, grad: Array, output_size: Ints, input_size: Ints, *options: Any) -> Array:
    align_corners, scales = _options(len(output_size), options)
    first = grad.ndim - len(output_size)
    bands = [b.adjoint() for b in _bands(mode, input_size[first:], output_size, align_corners, scales, grad)]
    result = hlo.convert(grad, compute_dtype(grad.dtype))
    for i, band in enumerate(bands):
        result = axis.apply(result, first + i, band)
    return result


def _options(spatial: int, options: Sequence[Any]) -> tuple[bool, Sequence[float | None]]:
    """Whether corners align (an argument that nearest modes don't have) and each dimension's scale."""
    align_corners = len(options) > spatial and options[0]
    scales = options[len(options) - spatial :] if len(options) >= spatial else [None] * spatial
    return align_corners, scales


_MODES: dict[str, Interpolation] = {
    "upsample_nearest1d": nearest,
    "upsample_nearest2d": nearest,
    "upsample_nearest3d": nearest,
    "_upsample_nearest_exact1d": nearest_exact,
    "_upsample_nearest_exact2d": nearest_exact,
    "_upsample_nearest_exact3d": nearest_exact,
    "upsample_linear1d": linear,
    "upsample_bilinear2d": linear,
    "upsample_trilinear3d": linear,
    "upsample_bicubic2d": cubic,
    "_upsample_bilinear2d_aa": _antialiased(2, _triangle),
    "_upsample_bicubic2d_aa": _antialiased(4, functools.partial(_keys, a=-0.5)),
    "_upsample_lanczos2d_aa": _antialiased(6, _lanczos3),
}

for _name, _mode in _MODES.items():
    _scales = ("scales", "scales_d", "scales_h", "scales_w")
    lower(_name, static=_scales)(functools.partial(resize, _mode))
    lower(f"{_name}_backward", static=_scales)(functools.partial(resize_backward, _mode))
