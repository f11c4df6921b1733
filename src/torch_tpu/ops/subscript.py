"""`x[i]`, `x[i] = v` and `x[mask] = v`.

Eager mode looks for the positions of a mask's true elements first (`eager.kernels.mask_indexing`). In a graph a write
through a mask needs none; what is read through one has a size that data decides, so no program can express it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.types import type_name
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, NoLowering, lower
from torch_tpu.ops.indexing import OUT_OF_BOUNDS, IndexedElements, added, check_bounds, read, region, replaced, wrapped
from torch_tpu.ops.scan import cumulative_sum

MASKS = (torch.bool, torch.uint8)


def _indexed(x: Array, indices: Sequence[Array | None], check: Check | None) -> IndexedElements:
    """The region of `x[indices]`: indices next to each other leave their dimensions there, others put them first."""
    given = {d: i for d, i in enumerate(indices) if i is not None}
    dims = list(given)
    block = hlo.broadcast_shapes(*(i.shape for i in given.values()))
    if 0 not in block and any(x.shape[d] == 0 for d in dims):
        raise IndexError("index is out of bounds for dimension with size 0")
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    where = region(x.shape, {d: wrapped(i, x.shape[d]) for d, i in given.items()}, dims[0] if adjacent else 0)
    if check is not None and 0 not in where.shape:
        for d, i in given.items():
            check_bounds(check, i, x.shape[d], OUT_OF_BOUNDS.format(dim=d, size=x.shape[d]), low=-x.shape[d])
    return where


@lower("index.Tensor", "_unsafe_index.Tensor")
def index(x: Array, indices: Sequence[Array | None], *, check: Check) -> Array:
    if _has_mask(indices):
        raise NoLowering("reading through a mask: the size depends on data")
    return read(x, _indexed(x, indices, check)) if any(i is not None for i in indices) else x


@lower("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(
    x: Array,
    indices: Sequence[Array | None],
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
    *,
    check: Check,
) -> Array:
    if x.dtype is not values.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {type_name(x.dtype)} for the destination "
            f"and {type_name(values.dtype)} for the source."
        )
    if _has_mask(indices):
        return _put_by_mask(x, indices, values, accumulate, None if unsafe else check)
    where = _indexed(x, indices, None if unsafe else check)
    # Leading dimensions of size 1 may exceed the region's, as in `x[i] = v[None]`.
    spare = max(values.ndim - len(where.shape), 0)
    shape = values.shape[spare:]
    if any(size != 1 for size in values.shape[:spare]) or any(
        size not in (1, room) for size, room in zip(shape[::-1], where.shape[::-1], strict=False)
    ):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(where.shape)}"
        )
    return (added if accumulate else replaced)(x, where, hlo.reshape(values, shape))


# --- masks -------------------------------------------------------------------------------------------------------


def rank(mask: Array) -> Array:
    """For each true element, in row-major order, how many come before it."""
    return cumulative_sum(hlo.convert(mask.reshape(-1), torch.int32), 0) - 1


def true_elements(ranks: Array) -> Array:
    """How many elements of a mask are true, by their ranks."""
    if not ranks.size:
        return hlo.constant(0, torch.int32)
    return hlo.reshape(hlo.slice_in_dim(ranks, ranks.size - 1, ranks.size), ()) + 1


def _has_mask(indices: Sequence[Array | None]) -> bool:
    return any(i is not None and i.dtype in MASKS for i in indices)


def _put_by_mask(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool, check: Check | None
) -> Array:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) != 1:
        raise NoLowering("a mask beside other indices: sizes depend on data")
    before, mask = given[0]
    mask = hlo.convert(mask, torch.bool)
    after = x.ndim - before - mask.ndim
    if after < 0 or mask.shape != x.shape[before : before + mask.ndim]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} does not match the shape of the indexed tensor {list(x.shape)} "
            f"from dimension {before} on"
        )
    new = hlo.broadcast_to(_for_each_element(x, mask, before, values, check), x.shape)
    where = hlo.broadcast_to(mask.reshape(*mask.shape, *(1,) * after), x.shape)
    if accumulate and x.dtype is torch.bool:
        new = hlo.or_(x, new)
    elif accumulate:
        dtype = compute_dtype(x.dtype)
        new = hlo.convert(hlo.convert(x, dtype) + hlo.convert(new, dtype), x.dtype)
    return hlo.select(where, new, x)


def _for_each_element(x: Array, mask: Array, before: int, values: Array, check: Check | None) -> Array:
    """What goes to each element if the mask is true there: values' n-th slice where it is the n-th true element."""
    outer, inner = x.shape[:before], x.shape[before + mask.ndim :]
    room = len(outer) + 1 + len(inner)
    spare = max(values.ndim - room, 0)
    shape = (1,) * (room - values.ndim) + values.shape[spare:]
    count = shape[before]
    result = ", ".join(map(str, (*outer, "{}", *inner)))
    mismatch = (
        f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape"
    )
    if any(size != 1 for size in values.shape[:spare]) or any(
        size not in (1, n) for size, n in zip(shape, (*outer, count, *inner), strict=True)
    ):
        raise RuntimeError(f"{mismatch} [{result}]".format("?"))
    values = hlo.reshape(values, shape)
    if count == 1:
        return hlo.reshape(values, (*shape[:before], *(1,) * mask.ndim, *shape[before + 1 :]))
    ranks = rank(mask)
    if check is not None:
        found = true_elements(ranks)
        check(found.eq(count), f"{mismatch} [{result}]", RuntimeError, found)
    if not count:
        return x
    values = read(values, region(shape, {before: hlo.clamp(0, ranks, count - 1)}, before))
    return hlo.reshape(values, (*shape[:before], *mask.shape, *shape[before + 1 :]))
