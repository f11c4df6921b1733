"""Padding with a constant, by reflection and by repeating the edge; and the gradients of the latter two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import lower
from torch_tpu.ops.indexing import read, region
from torch_tpu.ops.reduction import index_dtype

# The `count` elements put before (or, `at_end`, after) those of a dimension.
Edge = Callable[[Array, int, int, bool], Array]
# From where in a dimension of that size the elements at some positions come; in the padding these lie outside of it.
Source = Callable[[Array, int], Array]
# The gradient of the `size` elements of a dimension that such an edge's gradient gives.
EdgeGradient = Callable[[Array, int, int, bool], Array]


def _pairs(padding: Sequence[int], ndim: int) -> list[tuple[int, int, int]]:
    """(dimension, low, high) of PyTorch's list, which begins with the last dimension."""
    return [(ndim - 1 - i, padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]


@lower("constant_pad_nd")
def constant_pad_nd(x: Array, padding: Sequence[int], value: ArrayLike = 0) -> Array:
    low, high = [0] * x.ndim, [0] * x.ndim
    for dim, before, after in _pairs(padding, x.ndim):
        low[dim], high[dim] = before, after
    return hlo.pad(x, hlo.as_array(value, x.dtype), low, high)


# --- edges -------------------------------------------------------------------------------------------------------


def _mirror(x: Array, dim: int, count: int, at_end: bool) -> Array:
    """The elements next to the edge one, in reverse."""
    start = x.shape[dim] - 1 - count if at_end else 1
    return hlo.reverse(hlo.slice_in_dim(x, start, start + count, dim=dim), [dim])


def _mirror_gradient(grad: Array, dim: int, size: int, at_end: bool) -> Array:
    count = grad.shape[dim]
    start = size - 1 - count if at_end else 1
    return _placed(hlo.reverse(grad, [dim]), dim, start, size)


def _repeated(x: Array, dim: int, count: int, at_end: bool) -> Array:
    start = x.shape[dim] - 1 if at_end else 0
    edge = hlo.slice_in_dim(x, start, start + 1, dim=dim)
    shape = [count if d == dim else size for d, size in enumerate(x.shape)]
    return hlo.broadcast_in_dim(edge, shape, range(x.ndim))


def _repeated_gradient(grad: Array, dim: int, size: int, at_end: bool) -> Array:
    total = hlo.expand_dims(structured.reduce_sum(grad, [dim]), dim)
    return _placed(total, dim, size - 1 if at_end else 0, size)


def _placed(x: Array, dim: int, start: int, size: int) -> Array:
    """`x` from `start` on in a dimension of `size`, zeros around it; what doesn't fit is cut."""
    low = [start if d == dim else 0 for d in range(x.ndim)]
    high = [size - start - x.shape[dim] if d == dim else 0 for d in range(x.ndim)]
    return hlo.pad(x, 0, low, high)


# --- operators ---------------------------------------------------------------------------------------------------


def _padded(x: Array, padding: Sequence[int], edge: Edge, source: Source) -> Array:
    if module.target().platform == "cpu":
        return _gathered(x, padding, source)
    for dim, low, high in _pairs(padding, x.ndim):
        parts = [x]
        if low > 0:
            parts.insert(0, edge(x, dim, low, False))
        if high > 0:
            parts.append(edge(x, dim, high, True))
        joined = hlo.concatenate(parts, dim)
        x = hlo.slice_in_dim(joined, max(-low, 0), joined.shape[dim] - max(-high, 0), dim=dim)
    return x


def _gathered(x: Array, padding: Sequence[int], source: Source) -> Array:
    """Reads each position of the result from its place in `x`: three times as fast as joining on XLA:CPU."""
    for dim, low, high in _pairs(padding, x.ndim):
        size = x.shape[dim]
        if low or high:
            positions = source(hlo.iota((size + low + high,), 0, index_dtype(size + low + high)) - low, size)
            x = read(x, region(x.shape, {dim: positions}, dim))
    return x


def _reflected(position: Array, size: int) -> Array:
    return size - 1 - hlo.abs_(size - 1 - hlo.abs_(position))


def _clamped(position: Array, size: int) -> Array:
    return hlo.clamp(0, position, size - 1)


def _gradient(grad: Array, x: Array, padding: Sequence[int], edge: EdgeGradient) -> Array:
    total = hlo.convert(grad, compute_dtype(grad.dtype))
    for dim, low, high in _pairs(padding, x.ndim):
        size, end = x.shape[dim], total.shape[dim]
        before, after = max(low, 0), end - max(high, 0)
        inner = _placed(hlo.slice_in_dim(total, before, after, dim=dim), dim, max(-low, 0), size)
        if low > 0:
            inner = inner + edge(hlo.slice_in_dim(total, 0, before, dim=dim), dim, size, False)
        if high > 0:
            inner = inner + edge(hlo.slice_in_dim(total, after, end, dim=dim), dim, size, True)
        total = inner
    return total


@lower("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def reflection_pad(x: Array, padding: Sequence[int]) -> Array:
    return _padded(x, padding, _mirror, _reflected)


@lower("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def reflection_pad_backward(grad: Array, x: Array, padding: Sequence[int]) -> Array:
    return _gradient(grad, x, padding, _mirror_gradient)


@lower("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(x: Array, padding: Sequence[int]) -> Array:
    return _padded(x, padding, _repeated, _clamped)


@lower("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(grad: Array, x: Array, padding: Sequence[int]) -> Array:
    return _gradient(grad, x, padding, _repeated_gradient)
