"""Products of groups of matrices whose sizes are data: `_grouped_mm`, by the private operator `tpu::grouped_mm`.

A private operator because the meta kernel of `aten::_grouped_mm` refuses dtypes and strides that the CPU accepts.
"""

from __future__ import annotations

import torch

import torch_tpu.ops.private_operators  # noqa: F401  (defines `tpu::grouped_mm`)
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import decompose, lower
from torch_tpu.ops.matmul import dot, matrix_product

TILE = 128  # Rows multiplied at once; a group's last tile may be partly empty.


@decompose("_grouped_mm")
def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows of a (2-d) times the matrices of b (3-d), the transpose of that, or pairs of blocks of a and b (both 2-d).

    Group i goes from offs[i-1] to offs[i] of the dimension that is not grouped by a third one.
    """
    if not (a.dtype is b.dtype and a.dtype in (torch.float32, torch.bfloat16, torch.float16)):
        raise RuntimeError(
            f"Expected mat_a and mat_b to be Float32, BFloat16 or Float16 matrices, got {a.dtype}, {b.dtype}"
        )
    if a.dim() not in (2, 3) or b.dim() not in (2, 3):
        raise RuntimeError("mat_a and mat_b have to be 2 or 3 dimensional")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if (offs is not None) != (a.dim() == 2 or b.dim() == 2):
        raise RuntimeError("Have to provide offsets exactly if one of the matrices is 2-dimensional")
    if bias is not None:
        raise RuntimeError("Bias not supported yet")
    return torch.ops.tpu.grouped_mm(a, b, offs, out_dtype or a.dtype)


@lower("tpu::grouped_mm")
def lower_grouped_mm(a: Array, b: Array, offs: Array | None, out_dtype: torch.dtype) -> Array:
    if offs is None:
        return matrix_product(a, b)
    ends = hlo.convert(offs, torch.int32)
    if b.ndim == 3:
        return _rows_times_matrices(a, b, ends)
    if a.ndim == 3:
        swapped = _rows_times_matrices(hlo.transpose(b, [1, 0]), hlo.transpose(a, [0, 2, 1]), ends)
        return hlo.transpose(swapped, [1, 0])
    return _pairs_of_blocks(a, b, ends)


def _rows_times_matrices(rows: Array, matrices: Array, ends: Array) -> Array:
    """(rows, k) by (groups, k, n). Tiles run in the order of the groups, so each overwrites the last one's surplus."""
    (count, k), (_, _, n) = rows.shape, matrices.shape
    padded = hlo.pad(rows, 0, [0, 0], [TILE, 0])

    def step(group: Array, start: Array, stop: Array, result: Array) -> Array:
        zero = hlo.constant(0, torch.int32)
        tile = hlo.dynamic_slice(padded, [start, zero], [TILE, k])
        matrix = hlo.reshape(hlo.dynamic_slice(matrices, [group, zero, zero], [1, k, n]), (k, n))
        return hlo.dynamic_update_slice(result, dot(tile, matrix, ([1], [0])), [start, zero])

    result = _over_tiles(ends, step, hlo.zeros((count + TILE, n), compute_dtype(rows.dtype)))
    past_the_end = hlo.iota((count, n), 0) >= hlo.slice_in_dim(ends, ends.size - 1, ends.size)
    return (
        hlo.select(past_the_end, 0, hlo.slice_in_dim(result, 0, count))
        if ends.size
        else hlo.zeros((count, n), rows.dtype)
    )


def _pairs_of_blocks(a: Array, b: Array, ends: Array) -> Array:
    """(m, k) by (k, n), cut along k: one product per group."""
    m, n = a.shape[0], b.shape[1]
    a, b = hlo.pad(a, 0, [0, 0], [0, TILE]), hlo.pad(b, 0, [0, 0], [TILE, 0])

    def step(group: Array, start: Array, stop: Array, result: Array) -> Array:
        zero = hlo.constant(0, torch.int32)
        left, right = hlo.dynamic_slice(a, [zero, start], [m, TILE]), hlo.dynamic_slice(b, [start, zero], [TILE, n])
        left = hlo.select(start + hlo.iota((m, TILE), 1) < stop, left, 0)
        right = hlo.select(start + hlo.iota((TILE, n), 0) < stop, right, 0)
        at = [group, zero, zero]
        total = hlo.dynamic_slice(result, at, [1, m, n]) + hlo.expand_dims(dot(left, right, ([1], [0])), 0)
        return hlo.dynamic_update_slice(result, total, at)

    return _over_tiles(ends, step, hlo.zeros((ends.size, m, n), compute_dtype(a.dtype)))


def _over_tiles(ends: Array, step: structured.Combine, initial: Array) -> Array:
    """Runs step(group, first row, end of the group, result) for each tile of TILE rows of each group, in order."""
    groups = ends.size
    if groups == 0:
        return initial
    starts = hlo.pad(ends, 0, [1], [-1])
    counts = hlo.divide(ends - starts + (TILE - 1), TILE)
    earlier = hlo.iota((groups, groups), 1) <= hlo.iota((groups, groups), 0)
    last_tiles = structured.reduce_sum(hlo.select(earlier, hlo.expand_dims(counts, 0), 0), [1])

    def pick(table: Array, index: Array) -> Array:
        return hlo.reshape(hlo.dynamic_slice(table, [index], [1]), ())

    def body(i: Array, result: Array) -> list[Array]:
        group = structured.reduce_sum(hlo.convert(last_tiles <= i, torch.int32), [0])
        start = pick(starts, group) + (i - pick(last_tiles, group) + pick(counts, group)) * TILE
        return [i + 1, step(group, start, pick(ends, group), result)]

    total = pick(last_tiles, hlo.constant(groups - 1, torch.int32))
    return structured.while_loop([hlo.constant(0, torch.int32), initial], lambda i, _: i < total, body)[1]
