"""A = L D Lᵀ (or L D Lᴴ) of symmetric matrices that need not be definite, by Bunch and Kaufman; and its solver.

XLA has no such custom call. D has blocks of one or two rows; LAPACK's convention for the pivots: a positive p says that
row p (counted from 1) stands at this place, two negative ones that it stands at the second place of a block of two.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Check, lower
from torch_tpu.ops.linalg import permute_rows
from torch_tpu.ops.math.lapack import SINGULAR, require_success
from torch_tpu.ops.math.matrices import adjoint, broadcast_batch, triangle
from torch_tpu.ops.reduction import first_extreme

# Bounds the growth of elements, whichever size the blocks have (Bunch & Kaufman, 1977).
_ALPHA = (1 + math.sqrt(17)) / 8


def _magnitude(x: Array) -> Array:
    """LAPACK's measure for choosing pivots."""
    return hlo.abs_(hlo.real(x)) + hlo.abs_(hlo.imag(x)) if x.dtype.is_complex else hlo.abs_(x)


def _row(x: Array, i: Array) -> Array:
    """Row i of each matrix: for i a number, or one per matrix."""
    place = hlo.iota(x.shape, x.ndim - 2).eq(hlo.expand_dims(i, -1, -2) if i.ndim else i)
    return structured.reduce_sum(hlo.select(place, x, 0), [x.ndim - 2])


def _entry(x: Array, i: Array) -> Array:
    """Entry i of each vector."""
    place = hlo.iota(x.shape, x.ndim - 1).eq(hlo.expand_dims(i, -1) if i.ndim else i)
    return structured.reduce_sum(hlo.select(place, x, 0), [x.ndim - 1])


def _exchange(n: int, first: Array, second: Array) -> Array:
    """The order of n rows, two of them exchanged; one pair per matrix."""
    position = hlo.iota((*second.shape, n), second.ndim)
    first, second = (hlo.expand_dims(hlo.broadcast_to(i, second.shape), -1) for i in (first, second))
    return hlo.select(position.eq(first), second, hlo.select(position.eq(second), first, position))


def _swapped(x: Array, order: Array) -> Array:
    """Rows and columns in another order."""
    axes = [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]
    return hlo.transpose(permute_rows(hlo.transpose(permute_rows(x, order), axes), order), axes)


def _outer(x: Array, y: Array) -> Array:
    return hlo.expand_dims(x, -1) * hlo.expand_dims(y, -2)


@lower("linalg_ldl_factor_ex")
def linalg_ldl_factor_ex(a: Array, *, hermitian: bool, check_errors: bool, check: Check) -> list[Array]:
    n, batch = a.shape[-1], a.shape[:-2]
    hermitian = hermitian and a.dtype.is_complex
    if not a.size:
        return [a, hlo.zeros((*batch, n), torch.int32), hlo.zeros(batch, torch.int32)]
    below = triangle(a, upper=False, diagonal=-1)
    mirrored = adjoint(below) if hermitian else hlo.transpose(below, [*range(a.ndim - 2), a.ndim - 1, a.ndim - 2])
    rest = triangle(a, upper=False) + mirrored
    if hermitian:
        rest = hlo.select(hlo.iota((n, n), 0).eq(hlo.iota((n, n), 1)), hlo.convert(hlo.real(rest), a.dtype), rest)

    position = hlo.iota((*batch, n), len(batch))

    def largest(x: Array, allowed: Array) -> tuple[Array, Array]:
        value, where = first_extreme(hlo.select(allowed, _magnitude(x), -1), len(batch), structured.reduce_max)
        return hlo.maximum(value, 0), hlo.convert(where, torch.int32)

    def conj(x: Array) -> Array:
        return hlo.conj(x) if hermitian else x

    def column(k: Array, factor: Array, rest: Array, pivots: Array, info: Array, is_second: Array) -> list[Array]:
        """Columns before k are done; `rest` is symmetric, `is_second` where column k was done with the one before."""
        mine = _row(rest, k)
        size = _magnitude(_entry(mine, k))
        highest, row = largest(mine, position > k)
        other = _row(rest, row)
        beside = largest(other, (position >= k) & position.ne(hlo.expand_dims(row, -1)))[0]
        nothing = hlo.maximum(size, highest).eq(0) | hlo.is_nan(size)
        stays = nothing | (size >= highest * _ALPHA) | (size >= highest * _ALPHA * (highest / beside))
        alone = stays | (_magnitude(_entry(other, row)) >= beside * _ALPHA)
        pivot = hlo.select(stays, k, row)
        place = hlo.select(alone, k, hlo.broadcast_to(k + 1, batch))
        swapped = _swapped(rest, _exchange(n, place, pivot))

        x, y = conj(_row(swapped, k)), conj(_row(swapped, k + 1))
        d, e, f = _entry(x, k), _entry(y, k + 1), _entry(x, k + 1)
        # One row: the column over its pivot.
        one = hlo.select(hlo.expand_dims(nothing, -1), x, x / hlo.expand_dims(d, -1))
        # Two: the pair of columns by the inverse of the block [d f̄; f e], scaled by f.
        scaled_e, scaled_d = e / f, d / conj(f)
        scale = 1 / (scaled_e * scaled_d - 1)
        d, e, f, scaled_d, scaled_e, scale = (hlo.expand_dims(v, -1) for v in (d, e, f, scaled_d, scaled_e, scale))
        first = (scaled_e * x - y) * (scale / conj(f))
        second = (scaled_d * y - x) * (scale / f)

        single, is_after = hlo.expand_dims(alone, -1), position > k
        is_after_pair = position > k + 1
        column_k = hlo.select(single, hlo.select(is_after, one, x), hlo.select(is_after_pair, first, x))
        update_one = _outer(one, conj(x))
        update_two = _outer(first, conj(x)) + _outer(second, conj(y))
        keep = hlo.expand_dims(nothing, -1, -2)
        update = hlo.select(hlo.expand_dims(single, -1), hlo.select(keep, 0, update_one), update_two)
        new_rest = swapped - update

        def put(target: Array, at: Array, values: Array, wanted: Array) -> Array:
            """`values` as a column, from the diagonal on."""
            rows, columns = hlo.iota(target.shape, target.ndim - 2), hlo.iota(target.shape, target.ndim - 1)
            there = columns.eq(at) & (rows >= at) & hlo.expand_dims(wanted, -1, -2)
            return hlo.select(there, hlo.expand_dims(values, -1), target)

        todo = ~is_second
        new_factor = put(factor, k, column_k, todo)
        new_factor = put(new_factor, k + 1, hlo.select(is_after_pair, second, y), todo & ~alone)
        sign = hlo.select(alone, pivot + 1, -(pivot + 1))
        is_here = position.eq(k) | (position.eq(k + 1) & ~single)
        new_pivots = hlo.select(is_here & hlo.expand_dims(todo, -1), hlo.expand_dims(sign, -1), pivots)
        new_info = hlo.select(todo & nothing & info.eq(0), k + 1, info)
        new_rest = hlo.select(hlo.expand_dims(todo, -1, -2), new_rest, rest)
        return [new_factor, new_rest, new_pivots, new_info, todo & ~alone]

    initial = [hlo.full_like(a, 0), rest, hlo.zeros((*batch, n), torch.int32), hlo.zeros(batch, torch.int32)]
    results = structured.fori_loop(n, column, [*initial, hlo.full(batch, False, torch.bool)])
    factor, _, pivots, info, _ = results
    if check_errors:
        require_success(info, check, "torch.linalg.ldl_factor_ex", SINGULAR)
    return [factor, pivots, info]


@lower("linalg_ldl_solve")
def linalg_ldl_solve(factor: Array, pivots: Array, b: Array, *, hermitian: bool) -> Array:
    factor, b = broadcast_batch(factor, b)
    if not b.size:
        return b
    hermitian = hermitian and factor.dtype.is_complex
    *batch, n, _ = factor.shape
    pivots = hlo.broadcast_to(pivots, (*batch, n))
    below = triangle(factor, upper=False)
    columns = hlo.transpose(below, [*range(len(batch)), len(batch) + 1, len(batch)])
    position, flags = hlo.iota((n, 1), 0), hlo.full(batch, False, torch.bool)

    def conj(x: Array) -> Array:
        return hlo.conj(x) if hermitian else x

    def wide(x: Array) -> Array:
        return hlo.expand_dims(x, -1, -2)

    def forward(k: Array, x: Array, is_second: Array) -> list[Array]:
        """Divides by the columns of L and the block of D at k."""
        pivot = _entry(pivots, k)
        double = pivot < 0
        place = hlo.select(double, hlo.broadcast_to(k + 1, batch), k)
        swapped = permute_rows(x, _exchange(n, place, hlo.abs_(pivot) - 1))
        p, q = _row(columns, k), _row(columns, k + 1)
        u, v = _row(swapped, k), _row(swapped, k + 1)
        d, e, f = (hlo.expand_dims(entry, -1) for entry in (_entry(p, k), _entry(q, k + 1), _entry(p, k + 1)))
        behind = position > hlo.select(double, hlo.broadcast_to(k + 1, batch), k).reshape(*batch, 1, 1)
        by_two = hlo.select(wide(double), _outer(q, v), 0)
        reduced = swapped - hlo.select(behind, _outer(p, u) + by_two, 0)
        scaled_d, scaled_e, scaled_u, scaled_v = d / conj(f), e / f, u / conj(f), v / f
        determinant = scaled_d * scaled_e - 1
        two = (scaled_e * scaled_u - scaled_v) / determinant, (scaled_d * scaled_v - scaled_u) / determinant
        at_k = hlo.select(hlo.expand_dims(double, -1), two[0], u / d)
        reduced = hlo.select(position.eq(k), hlo.expand_dims(at_k, -2), reduced)
        reduced = hlo.select(position.eq(k + 1) & wide(double), hlo.expand_dims(two[1], -2), reduced)
        return [hlo.select(wide(is_second), x, reduced), double & ~is_second]

    def backward(i: Array, x: Array, is_first: Array) -> list[Array]:
        """Divides by the columns of Lᵀ (or Lᴴ) of the block that ends at k."""
        k = (n - 1) - i
        pivot = _entry(pivots, k)
        double = pivot < 0

        def without(column: Array, target: Array) -> Array:
            products = hlo.select(position > k, hlo.expand_dims(conj(column), -1) * x, 0)
            return target - structured.reduce_sum(products, [x.ndim - 2])

        solved = hlo.select(position.eq(k), hlo.expand_dims(without(_row(columns, k), _row(x, k)), -2), x)
        pair = hlo.expand_dims(without(_row(columns, k - 1), _row(x, k - 1)), -2)
        solved = hlo.select(position.eq(k - 1) & wide(double), pair, solved)
        solved = permute_rows(solved, _exchange(n, k, hlo.abs_(pivot) - 1))
        return [hlo.select(wide(is_first), x, solved), double & ~is_first]

    halfway = structured.fori_loop(n, forward, [b, flags])[0]
    return structured.fori_loop(n, backward, [halfway, flags])[0]
