"""Sampling at given places (`grid_sample`), images as columns of their blocks (`unfold`, `fold`), channels shuffled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import decompose, lower

Ints = Sequence[int]
LINEAR, NEAREST, CUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
KEYS_A = -0.75


# --- places in the input -----------------------------------------------------------------------------------------


class Tap(NamedTuple):
    """One element that a result looks at along one dimension: where, with which weight, and the weight's slope."""

    place: Array
    weight: Array | None
    slope: Array | None


def _place(grid: Array, size: int, align_corners: bool) -> tuple[Array, float]:
    """[-1, 1] as elements of a dimension, and the derivative of that."""
    scale = (size - 1) / 2 if align_corners else size / 2
    place = (grid + 1) * scale
    return (place if align_corners else place - 0.5), scale


def _clip(place: Array, size: int) -> tuple[Array, Array]:
    """A place moved to the border it lies behind (NaN to 0), and the derivative, which is 0 on the border as well."""
    inside = (place > 0) & (place < size - 1)
    return hlo.minimum(hlo.select(place > 0, place, 0), size - 1), hlo.convert(inside, place.dtype)


def _reflect(place: Array, size: int, align_corners: bool) -> tuple[Array, Array]:
    """A place mirrored at the borders until it lies inside, and the derivative (1 or -1)."""
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return hlo.full_like(place, 0), hlo.full_like(place, 0)
    shifted = place - low
    distance = hlo.abs_(shifted)
    flips = hlo.floor(distance / span)
    rest = distance - flips * span
    odd = (flips - hlo.floor(flips / 2) * 2).eq(1)
    sign = hlo.select(shifted < 0, hlo.full_like(place, -1), 1)
    return hlo.select(odd, span - rest, rest) + low, hlo.select(odd, -sign, sign)


def _padded(place: Array, size: int, padding: int, align_corners: bool) -> tuple[Array, Array]:
    slope = hlo.full_like(place, 1)
    if padding == REFLECTION:
        place, slope = _reflect(place, size, align_corners)
    if padding != ZEROS:
        place, inside = _clip(place, size)
        slope = slope * inside
    return place, slope


def _keys(t: Array) -> list[tuple[Array, Array]]:
    """Weights and slopes of the four neighbours of a place t behind the second (cubic convolution, Keys 1981)."""
    a = KEYS_A
    results = []
    for i in range(4):
        x = t + (1 - i) if i < 2 else (i - 1) - t
        sign = 1 if i < 2 else -1
        if i in (1, 2):
            weight = ((a + 2) * x - (a + 3)) * x * x + 1
            slope = (3 * (a + 2) * x - 2 * (a + 3)) * x
        else:
            weight = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
            slope = (3 * a * x - 10 * a) * x + 8 * a
        results.append((weight, slope * sign))
    return results


def _taps(grid: Array, size: int, mode: int, padding: int, align_corners: bool) -> list[Tap]:
    """What results look at along a dimension, given the grid's coordinates (batch, result) for it."""
    place, scale = _place(grid, size, align_corners)
    if mode == CUBIC:
        first = hlo.floor(place)
        weights = _keys(place - first)
        places = (_padded(first + (i - 1), size, padding, align_corners)[0] for i in range(4))
        return [Tap(p, w, slope * scale) for p, (w, slope) in zip(places, weights, strict=True)]
    place, chain = _padded(place, size, padding, align_corners)
    if mode == NEAREST:
        return [Tap(hlo.round_nearest_even(place), None, None)]
    first = hlo.floor(place)
    t, slope = place - first, chain * scale
    return [Tap(first, 1 - t, -slope), Tap(first + 1, t, slope)]


def _combinations(
    grid: Array, sizes: Ints, mode: int, padding: int, align_corners: bool
) -> Iterator[tuple[Array, Array, tuple[Tap, ...]]]:
    """For every neighbour: its flat position (batch, result), whether it is inside the input, and its taps."""
    # The grid's last dimension has x, the place in the last spatial dimension, first.
    coordinates = [hlo.slice_in_dim(grid, i, i + 1, dim=2).reshape(*grid.shape[:2]) for i in range(len(sizes))][::-1]
    per_dimension = [_taps(c, size, mode, padding, align_corners) for c, size in zip(coordinates, sizes, strict=True)]
    for taps in itertools.product(*per_dimension):
        inside = hlo.constant(True, torch.bool, grid.shape[:2])
        flat = hlo.zeros(grid.shape[:2], torch.int32)
        for tap, size in zip(taps, sizes, strict=True):
            inside = inside & (tap.place >= 0) & (tap.place <= size - 1)
            flat = flat * size + hlo.convert(hlo.select(inside, tap.place, 0), torch.int32)
        yield flat, inside, taps


def _product(taps: Sequence[Tap], slope_of: int = -1) -> Array | None:
    """The weight of a neighbour, or its derivative with respect to the place in one dimension."""
    result = None
    for i, tap in enumerate(taps):
        factor = tap.slope if i == slope_of else tap.weight
        if factor is not None:
            result = factor if result is None else result * factor
    return result


# --- grid_sample -------------------------------------------------------------------------------------------------


def _look_up(x: Array, positions: Array, inside: Array) -> Array:
    """x (batch, channel, element) at positions (batch, result), 0 where they are outside."""
    found = structured.gather(
        x,
        hlo.expand_dims(positions, 2),
        offset_dims=[1],
        collapsed_slice_dims=[2],
        start_index_map=[2],
        slice_sizes=[1, x.shape[1], 1],
        operand_batching_dims=[0],
        start_indices_batching_dims=[0],
    )
    return hlo.select(hlo.expand_dims(inside, 1), found, 0)


def _wide(x: Array, grid: Array) -> tuple[Array, Array]:
    """x as (batch, channel, element) and grid as (batch, result, coordinate), in the dtype computed in."""
    dtype = compute_dtype(x.dtype)
    x = hlo.convert(x, dtype).reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    return x, hlo.convert(grid, dtype).reshape(grid.shape[0], math.prod(grid.shape[1:-1]), grid.shape[-1])


@lower("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def grid_sampler(x: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    shape = (*x.shape[:2], *grid.shape[1:-1])
    if not math.prod(shape):
        return hlo.zeros(shape, x.dtype)
    flat, places = _wide(x, grid)
    total = hlo.zeros((*x.shape[:2], places.shape[1]), flat.dtype)
    for positions, inside, taps in _combinations(places, x.shape[2:], mode, padding, align_corners):
        value, weight = _look_up(flat, positions, inside), _product(taps)
        total = total + (value if weight is None else value * hlo.expand_dims(weight, 1))
    return total.reshape(*shape)


@lower("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: Array, x: Array, grid: Array, mode: int, padding: int, align_corners: bool, output_mask: Sequence[bool]
) -> list[Array | None]:
    spatial, sizes = x.ndim - 2, x.shape[2:]
    if not grad.size:
        return [hlo.zeros(x.shape, x.dtype) if output_mask[0] else None, hlo.zeros(grid.shape, grid.dtype)]
    flat, places = _wide(x, grid)
    wide_grad = hlo.convert(grad, flat.dtype).reshape(*x.shape[:2], places.shape[1])
    targets, updates = [], []
    slopes: list[Array | None] = [None] * spatial
    for positions, inside, taps in _combinations(places, sizes, mode, padding, align_corners):
        if output_mask[0]:
            weight = _product(taps)
            updates.append(wide_grad if weight is None else wide_grad * hlo.expand_dims(weight, 1))
            # A position behind the end is dropped by the scatter.
            targets.append(hlo.select(inside, positions, math.prod(sizes)))
        if output_mask[1] and mode != NEAREST:
            sensitivity = structured.reduce_sum(wide_grad * _look_up(flat, positions, inside), [1])
            for d in range(spatial):
                derivative, before = _product(taps, slope_of=d), slopes[d]
                assert derivative is not None
                slopes[d] = sensitivity * derivative if before is None else before + sensitivity * derivative
    grad_x = _put(targets, updates, flat).reshape(*x.shape) if output_mask[0] else None
    filled = [hlo.zeros(places.shape[:2], places.dtype) if s is None else s for s in slopes]
    return [grad_x, hlo.stack(filled[::-1], 2).reshape(*grid.shape)]


@decompose("_grid_sampler_2d_cpu_fallback_backward")
def grid_sampler_fallback_backward(
    grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = [True, True]
    return torch.ops.aten.grid_sampler_2d_backward(grad, x, grid, mode, padding, align_corners, wanted)


def _put(targets: Sequence[Array], updates: Sequence[Array], like: Array) -> Array:
    """Updates (batch, channel, result) added up at targets (batch, result)."""
    return structured.scatter(
        [hlo.zeros(like.shape, like.dtype)],
        hlo.expand_dims(hlo.concatenate(targets, 1), 2),
        [hlo.concatenate(updates, 2)],
        hlo.add,
        update_window_dims=[1],
        inserted_window_dims=[2],
        scatter_dims_to_operand_dims=[2],
        input_batching_dims=[0],
        scatter_indices_batching_dims=[0],
    )[0]


# --- blocks ------------------------------------------------------------------------------------------------------


def _counts(sizes: Ints, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> list[int]:
    """Number of blocks along each dimension."""
    return [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip(sizes, kernel, dilation, padding, stride, strict=True)
    ]


@lower("im2col")
def im2col(x: Array, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    if min(padding) < 0:
        raise RuntimeError(f"padding should be non-negative, but got {tuple(padding)}")
    counts = _counts(x.shape[-2:], kernel, dilation, padding, stride)
    lead = x.shape[:-2]
    blocks = hlo.pad(x, 0, [*[0] * len(lead), *padding], [*[0] * len(lead), *padding])
    for i in range(2):
        # (…, kh, oh, W) after the first dimension, (…, kh, oh, kw, ow) after the second.
        dim = len(lead) + 2 * i
        reach = (counts[i] - 1) * stride[i] + 1
        starts = [t * dilation[i] for t in range(kernel[i])]
        blocks = hlo.stack([hlo.slice_in_dim(blocks, s, s + reach, stride[i], dim) for s in starts], dim)
    first = len(lead)
    blocks = hlo.transpose(blocks, [*range(first), first, first + 2, first + 1, first + 3])
    return blocks.reshape(*lead[:-1], lead[-1] * math.prod(kernel), math.prod(counts))


@lower("col2im")
def col2im(x: Array, output_size: Ints, kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> Array:
    counts = _counts(output_size, kernel, dilation, padding, stride)
    lead = (*x.shape[:-2], x.shape[-2] // math.prod(kernel))
    first = len(lead)
    image = hlo.convert(x, compute_dtype(x.dtype)).reshape(*lead, *kernel, *counts)
    image = hlo.transpose(image, [*range(first), first, first + 2, first + 1, first + 3])
    for i in (1, 0):
        dim = first + 2 * i
        terms = []
        for t in range(kernel[i]):
            low = t * dilation[i] - padding[i]
            high = output_size[i] - low - ((counts[i] - 1) * stride[i] + 1)
            tap = hlo.squeeze(hlo.slice_in_dim(image, t, t + 1, dim=dim), dim)
            edges = [[e if d == dim else 0 for d in range(tap.ndim)] for e in (low, high, stride[i] - 1)]
            terms.append(hlo.pad(tap, 0, *edges))
        image = sum(terms[1:], terms[0])
    return image


# --- channels ----------------------------------------------------------------------------------------------------


@lower("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(x: Array, groups: int) -> Array:
    """Channels in `groups` blocks, dealt out one of each block in turn."""
    batch, channels, *rest = x.shape
    if groups <= 0 or channels % groups:
        raise RuntimeError(f"channel_shuffle: {groups} groups can't share {channels} channels evenly")
    blocks = hlo.reshape(x, [batch, groups, channels // groups, *rest])
    return hlo.reshape(hlo.transpose(blocks, [0, 2, 1, *range(3, blocks.ndim)]), x.shape)
