"""Convolutions that XLA:CPU runs many times faster when they are written as something else: grouped and 3-d ones.

With groups, and with three spatial dimensions, it falls back to a scalar loop. TPU's compiler wants them as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype

Ints = Sequence[int]
Edges = Sequence[tuple[int, int]]

# A depthwise kernel of more taps would make a long program. Other groups are taken as so many convolutions; each has
# several groups if need be, and multiplies zeros, as many times more as it has groups.
_DEPTHWISE_TAPS, _CONVOLUTIONS, _GROUPS_IN_ONE = 64, 8, 8


def is_depthwise(groups: int, channels: int, kernel: Ints, size: Ints) -> bool:
    """Whether a convolution of `channels` per group, or its weight gradient, is written tap by tap."""
    taps, on_cpu = math.prod(kernel), module.target().platform == "cpu"
    return on_cpu and groups > 1 == channels and 0 < taps <= _DEPTHWISE_TAPS and math.prod(size) > 0


def parts(groups: int, size: Ints) -> int:
    """Of how many convolutions without groups a grouped one is made; 1 if it stays as it is."""
    if module.target().platform != "cpu" or not math.prod(size):
        return 1
    count = max(n for n in range(1, _CONVOLUTIONS + 1) if groups % n == 0)
    return count if groups // count <= _GROUPS_IN_ONE else 1


def is_in_planes(spatial: int, size: Ints) -> bool:
    return module.target().platform == "cpu" and spatial == 3 and math.prod(size) > 0


def padded(x: Array, edges: Edges, dilation: Ints) -> Array:
    """In memory of its own: computed again for each tap, it costs four times as much."""
    low, high = ([0, 0, *(pair[end] for pair in edges)] for end in range(2))
    spread = hlo.pad(x, 0, low, high, [0, 0, *(d - 1 for d in dilation)])
    return x if spread is x else structured.optimization_barrier(spread)


def windows(x: Array, kernel: Ints, size: Ints, stride: Ints, dilation: Ints) -> Iterator[Array]:
    """For each tap of the kernel, the elements of the last dimensions it meets."""
    leading = x.ndim - len(kernel)
    for tap in itertools.product(*(range(k) for k in kernel)):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        limits = [start + (n - 1) * s + 1 for start, n, s in zip(starts, size, stride, strict=True)]
        whole = [0] * leading, list(x.shape[:leading]), [1] * leading
        yield hlo.slice_(x, [*whole[0], *starts], [*whole[1], *limits], [*whole[2], *stride])


def depthwise(x: Array, weight: Array, size: Ints, stride: Ints, dilation: Ints) -> Array:
    """A convolution of a padded x, each channel by itself: a sum of products."""
    dtype, channels, kernel = compute_dtype(x.dtype), x.shape[1], weight.shape[2:]
    outputs = weight.shape[0] // channels
    taps = hlo.convert(weight, dtype).reshape(channels, outputs, math.prod(kernel), *[1] * len(size))
    total: Array | None = None
    for i, window in enumerate(windows(x, kernel, size, stride, dilation)):
        factor = hlo.squeeze(hlo.slice_in_dim(taps, i, i + 1, dim=2), 2)
        # A channel with several results gets a dimension for them; with one, that would cost a factor of four.
        column = window if outputs == 1 else hlo.expand_dims(window, 2)
        product = hlo.convert(column, dtype) * (hlo.squeeze(factor, 1) if outputs == 1 else factor)
        total = product if total is None else total + product
    assert total is not None
    return total.reshape(x.shape[0], weight.shape[0], *size)


def depthwise_weight_gradient(x: Array, y: Array, kernel: Ints, stride: Ints, dilation: Ints) -> Array:
    """Products added image by image, which is a vector operation, and only then over the positions, which isn't."""
    dtype, channels, size = compute_dtype(x.dtype), x.shape[1], y.shape[2:]
    outputs = y.shape[1] // channels

    def image(a: Array, n: Array) -> Array:
        zero = hlo.constant(0, n.dtype)
        taken = hlo.dynamic_slice(a, [n, *[zero] * (a.ndim - 1)], [1, *a.shape[1:]])
        return hlo.convert(taken, dtype).reshape(*a.shape[1:])

    def add_image(n: Array, *sums: Array) -> list[Array]:
        grad = image(y, n).reshape(channels, outputs, *size)
        taps = windows(image(x, n), kernel, size, stride, dilation)
        return [s + hlo.expand_dims(w, 1) * grad for s, w in zip(sums, taps, strict=True)]

    initial = [hlo.zeros((channels, outputs, *size), dtype)] * math.prod(kernel)
    sums = hlo.stack(structured.fori_loop(y.shape[0], add_image, initial), 2)
    return structured.reduce_sum(sums, list(range(3, sums.ndim))).reshape(y.shape[1], 1, *kernel)


def _piece(x: Array, i: int, count: int, dim: int) -> Array:
    size = x.shape[dim] // count
    return hlo.slice_in_dim(x, i * size, (i + 1) * size, dim=dim)


def in_parts(x: Array, weight: Array, groups: int, count: int, convolve: Callable[[Array, Array], Array]) -> Array:
    """A grouped convolution as `count` ones without groups."""
    together = groups // count
    outputs, inputs, *kernel = weight.shape
    if together > 1:
        shape = (count, together, outputs // groups, together, inputs, *kernel)
        blocks = weight.reshape(count, together, outputs // groups, 1, inputs, *kernel)
        weight = hlo.select(_same_group(shape), hlo.broadcast_to(blocks, shape), 0)
        weight = weight.reshape(outputs, together * inputs, *kernel)
    pieces = [convolve(_piece(x, i, count, 1), _piece(weight, i, count, 0)) for i in range(count)]
    return hlo.concatenate(pieces, 1)


def _same_group(shape: Ints) -> Array:
    return hlo.iota(shape, 1).eq(hlo.iota(shape, 3))


def weight_gradient_in_parts(
    x: Array, y: Array, groups: int, count: int, gradient: Callable[[Array, Array], Array]
) -> Array:
    """The gradient for the weight of `in_parts`."""
    together = groups // count
    whole = hlo.concatenate([gradient(_piece(x, i, count, 1), _piece(y, i, count, 1)) for i in range(count)], 0)
    outputs, inputs, *kernel = whole.shape
    shape = (count, together, outputs // groups, together, inputs // together, *kernel)
    own = hlo.select(_same_group(shape), whole.reshape(*shape), 0)
    return structured.reduce_sum(own, [3]).reshape(outputs, inputs // together, *kernel)


def in_planes(
    x: Array, weight: Array, depth: int, stride: int, dilation: int, convolve: Callable[[Array, Array], Array]
) -> Array:
    """A 3-d convolution of an x padded in depth as a 2-d one: a plane's neighbours in depth become its channels."""
    batch, channels, _, *plane = x.shape
    outputs, inputs, taps, *kernel = weight.shape
    reach = (depth - 1) * stride + 1
    slices = [hlo.slice_in_dim(x, t * dilation, t * dilation + reach, stride, 2) for t in range(taps)]
    planes = hlo.transpose(hlo.stack(slices, 2), (0, 3, 1, 2, 4, 5)).reshape(batch * depth, channels * taps, *plane)
    result = convolve(planes, weight.reshape(outputs, inputs * taps, *kernel))
    return hlo.transpose(result.reshape(batch, depth, outputs, *result.shape[2:]), (0, 2, 1, 3, 4))
