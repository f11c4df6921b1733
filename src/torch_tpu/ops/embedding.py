"""Embedding tables: look-up, bags of rows reduced together, renormalisation, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, lower
from torch_tpu.ops.indexing import OUT_OF_RANGE, added, check_bounds, check_rows, combined, read, region, replaced
from torch_tpu.ops.norm import p_norm

SUM, MEAN, MAX = 0, 1, 2


# --- look-up -----------------------------------------------------------------------------------------------------


@lower("embedding")
def embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    check: Check,
) -> Array:
    check_rows(check, indices, weight)
    return _rows(weight, indices)


def _rows(table: Array, indices: Array) -> Array:
    return read(table, region(table.shape, {0: indices}, 0))


def _frequencies(indices: Array, count: int) -> Array:
    """How often each of `count` rows occurs."""
    return added(hlo.zeros((count,), torch.int32), region((count,), {0: indices}), hlo.constant(1, torch.int32))


def _scattered_rows(grad: Array, indices: Array, count: int, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    """One gradient per index added up in a table of `count` rows, but for the padding row."""
    grad = hlo.convert(grad, compute_dtype(grad.dtype))
    if scale_grad_by_freq:
        frequency = hlo.convert(_rows(_frequencies(indices, count), indices), grad.dtype)
        grad = grad / hlo.expand_dims(frequency, -1)
    table = hlo.zeros((count, grad.shape[-1]), grad.dtype)
    return added(table, region(table.shape, {0: _without(indices, padding_idx, count)}, 0), grad)


def _without(indices: Array, padding_idx: int, count: int) -> Array:
    """The indices with the padding's moved out of bounds, where writes are dropped."""
    return hlo.select(indices.eq(padding_idx), count, indices) if padding_idx >= 0 else indices


@lower("embedding_dense_backward")
def embedding_dense_backward(
    grad: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    return _scattered_rows(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


@lower("embedding_renorm", static=["norm_type"])
def embedding_renorm(weight: Array, indices: Array, max_norm: ArrayLike, norm_type: float, *, check: Check) -> Array:
    """Scales the rows used whose norm exceeds `max_norm` to it (but for 1e-7, which avoids dividing by zero)."""
    check_bounds(check, indices, weight.shape[0], OUT_OF_RANGE)
    rows = hlo.convert(_rows(weight, indices), compute_dtype(weight.dtype))
    norm = hlo.expand_dims(p_norm(hlo.abs_(rows), norm_type, [rows.ndim - 1]), -1)
    limit = hlo.as_array(max_norm, norm.dtype)
    scaled = hlo.select(norm > limit, rows * (limit / (norm + 1e-7)), rows)
    return replaced(weight, region(weight.shape, {0: indices}, 0), scaled)


# --- bags --------------------------------------------------------------------------------------------------------


def _bag_of_each(offsets: Array, count: int) -> Array:
    """For positions 0 … count-1, the last bag that begins there or before, by bisection of the sorted offsets."""
    position = hlo.iota((count,), 0, offsets.dtype)
    bags = offsets.shape[0]
    low, high = hlo.full((count,), 0, torch.int32), hlo.full((count,), bags, torch.int32)
    for _ in range(bags.bit_length()):
        middle = hlo.shift_right_logical(low + high, 1)
        begun = _rows(offsets, hlo.minimum(middle, bags - 1)) <= position
        begun = begun & (middle < bags)
        low, high = hlo.select(begun, middle + 1, low), hlo.select(begun, high, middle)
    return low - 1


def _check_offsets(check: Check, offsets: Array, count: int) -> None:
    if not offsets.size:
        return
    first = hlo.reshape(hlo.slice_in_dim(offsets, 0, 1), ())
    last = hlo.reshape(hlo.slice_in_dim(offsets, offsets.size - 1, offsets.size), ())
    check(
        first.eq(0),
        "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. However, "
        "got {}",
        RuntimeError,
        first,
    )
    message = f"offsets[-1] can not be greater than input's length {count} but got offsets[-1] of {{}}"
    check(last <= count, message, RuntimeError, last)


@lower("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    out: Sequence[Spec],
    check: Check,
) -> tuple[Array, Array, Array, Array]:
    """Results: the bags, each index's bag, each bag's size without padding, the rows behind a maximum."""
    (bags, features), rows_in_table, count = out[0].shape, weight.shape[0], indices.shape[0]
    message = f"Index of input takes value {{}} which is not in the valid range [0, {rows_in_table})"
    check_bounds(check, indices, rows_in_table, message, RuntimeError)
    _check_offsets(check, offsets, count)
    if include_last_offset:
        offsets = hlo.slice_in_dim(offsets, 0, bags)
    dtype = compute_dtype(weight.dtype)
    if not count or not bags:
        return tuple(hlo.zeros(spec.shape, spec.dtype) for spec in out)  # type: ignore[return-value]
    bag = _bag_of_each(offsets, count)
    used = bag if padding_idx < 0 else hlo.select(indices.eq(padding_idx), bags, bag)
    sizes = _frequencies(used, bags)
    rows = hlo.convert(_rows(weight, indices), dtype)
    if per_sample_weights is not None:
        rows = rows * hlo.expand_dims(hlo.convert(per_sample_weights, dtype), 1)
    where = region((bags, features), {0: used}, 0)
    column = hlo.expand_dims(hlo.convert(sizes, dtype), 1)
    largest = hlo.zeros(out[3].shape, out[3].dtype)
    if mode == MAX:
        result, largest = _largest(rows, indices, used, (bags, features))
        result = hlo.select(column.eq(0), hlo.zeros(result.shape, dtype), result)
    else:
        result = added(hlo.zeros((bags, features), dtype), where, rows)
        if mode == MEAN:
            result = result / hlo.maximum(column, 1)
    # With `include_last_offset` PyTorch has one entry more than there are bags.
    return result, bag, hlo.pad(sizes, 0, [0], [out[2].shape[0] - bags]), largest


def _largest(rows: Array, indices: Array, bag: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Each bag's maximum by feature, and the index of the first row that has it; -1 in an empty bag."""
    count = rows.shape[0]
    where = region(shape, {0: bag}, 0)
    result = combined(hlo.full(shape, hlo.lowest(rows.dtype), rows.dtype), where, rows, hlo.maximum)
    of_bag = _rows(result, bag)
    candidate = hlo.select(rows.eq(of_bag) | hlo.is_nan(rows), hlo.iota(rows.shape, 0), count)
    first = combined(hlo.full(shape, count, torch.int32), where, candidate, hlo.minimum)
    index = _rows(indices, hlo.minimum(first, count - 1))
    return result, hlo.select(first.eq(count), -1, index)


@lower("_embedding_bag_backward")
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    if sparse:
        raise NotImplementedError("its gradient is sparse")
    return embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lower("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    grad = hlo.convert(grad, compute_dtype(grad.dtype))
    table = (num_weights, grad.shape[1])
    if not indices.size or not grad.size:
        return hlo.zeros(table, grad.dtype)
    if mode == MAX:
        rows = hlo.select(maximum_indices < 0, num_weights, maximum_indices)
        where = region(table, {0: rows, 1: hlo.iota(rows.shape, 1, rows.dtype)})
        return added(hlo.zeros(table, grad.dtype), where, grad)
    if mode == MEAN:
        sizes = hlo.slice_in_dim(bag_size, 0, grad.shape[0])
        grad = grad / hlo.expand_dims(hlo.convert(hlo.maximum(sizes, 1), grad.dtype), 1)
    of_index = _rows(grad, offset2bag)
    if per_sample_weights is not None:
        of_index = of_index * hlo.expand_dims(hlo.convert(per_sample_weights, grad.dtype), 1)
    return _scattered_rows(of_index, indices, num_weights, padding_idx, scale_grad_by_freq)


@lower("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(
    grad: Array,
    weight: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    mode: int,
    padding_idx: int = -1,
    *,
    out: Spec,
) -> Array:
    """The product of each index's row with the gradient of its bag."""
    if not indices.size:
        return hlo.zeros(out.shape, out.dtype)
    dtype = compute_dtype(grad.dtype)
    products = hlo.convert(_rows(weight, indices), dtype) * hlo.convert(_rows(grad, offset2bag), dtype)
    total = structured.reduce_sum(products, [1])
    return hlo.select(indices.eq(padding_idx), hlo.zeros(out.shape, dtype), total)
