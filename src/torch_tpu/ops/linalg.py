"""Triangular, Cholesky and LU factorisations, and the solvers built on them."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Check, Spec, decompose, lower
from torch_tpu.ops.math import lapack
from torch_tpu.ops.math.lapack import NOT_POSITIVE, SINGULAR, require_success
from torch_tpu.ops.math.matrices import adjoint, broadcast_batch, eye, triangle

Tensor = torch.Tensor


# --- triangular --------------------------------------------------------------------------------------------------


@lower("linalg_solve_triangular")
def linalg_solve_triangular(a: Array, b: Array, *, upper: bool, left: bool, unitriangular: bool) -> Array:
    a, b = broadcast_batch(a, b)
    return lapack.trsm(a, b, left=left, upper=upper, unit=unitriangular)


@lower("triangular_solve")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> list[Array]:
    a, b = broadcast_batch(a, b)
    form = "T" if transpose else "N"
    return [lapack.trsm(a, b, left=True, upper=upper, unit=unitriangular, transpose=form), a]


# --- Cholesky ----------------------------------------------------------------------------------------------------


@lower("linalg_cholesky_ex")
def linalg_cholesky_ex(a: Array, *, upper: bool, check_errors: bool, check: Check) -> list[Array]:
    factor, info = lapack.potrf(a, upper)
    if check_errors:
        require_success(info, check, "torch.linalg.cholesky_ex", NOT_POSITIVE)
    return [triangle(factor, upper=upper), info]


@lower("cholesky")
def cholesky(a: Array, upper: bool = False, *, check: Check) -> Array:
    factor, info = lapack.potrf(a, upper)
    require_success(info, check, "cholesky", NOT_POSITIVE)
    return triangle(factor, upper=upper)


def _solve_with_cholesky(factor: Array, b: Array, upper: bool) -> Array:
    first, second = ("C", "N") if upper else ("N", "C")
    half = lapack.trsm(factor, b, left=True, upper=upper, unit=False, transpose=first)
    return lapack.trsm(factor, half, left=True, upper=upper, unit=False, transpose=second)


@lower("_cholesky_solve_helper")
def cholesky_solve_helper(b: Array, factor: Array, upper: bool) -> Array:
    return _solve_with_cholesky(factor, b, upper)


@lower("cholesky_inverse")
def cholesky_inverse(factor: Array, upper: bool = False, *, check: Check) -> Array:
    """(L Lᴴ)⁻¹."""
    n = factor.shape[-1]
    diagonal = structured.reduce_sum(hlo.select(eye(n, n, torch.bool), factor, 0), [factor.ndim - 1])
    zero_at = hlo.select(diagonal.eq(0), hlo.iota((n,), 0) + 1, n + 1)
    first = structured.reduce_min(zero_at, [zero_at.ndim - 1])
    require_success(hlo.select(first <= n, first, 0), check, "cholesky_inverse", SINGULAR)
    return _solve_with_cholesky(factor, hlo.broadcast_to(eye(n, n, factor.dtype), factor.shape), upper)


# --- LU ----------------------------------------------------------------------------------------------------------


@lower("linalg_lu_factor_ex")
def linalg_lu_factor_ex(a: Array, *, pivot: bool, check_errors: bool, check: Check) -> list[Array]:
    if not pivot:
        raise RuntimeError("linalg.lu_factor: LU without pivoting is not implemented on the tpu device")
    lu, pivots, info = lapack.getrf(a)
    if check_errors:
        require_success(info, check, "torch.linalg.lu_factor_ex", SINGULAR)
    return [lu, pivots, info]


def _permutation(pivots: Array, m: int) -> Array:
    """The order of rows that LAPACK's exchanges (row i with row pivots[i], counted from 1) make: (…, m) int32."""
    *batch, k = pivots.shape
    position = hlo.iota((*batch, m), len(batch))
    if k == 0:
        return position

    def exchange(i: Array, order: Array) -> Array:
        zero = hlo.constant(0, torch.int32)
        other = hlo.dynamic_slice(pivots, [*[zero] * len(batch), i], [*batch, 1]) - 1
        mine = hlo.dynamic_slice(order, [*[zero] * len(batch), i], [*batch, 1])
        theirs = structured.reduce_sum(hlo.select(position.eq(other), order, 0), [len(batch)])
        order = hlo.select(position.eq(other), mine, order)
        return hlo.select(position.eq(i), hlo.expand_dims(theirs, -1), order)

    return structured.fori_loop(k, exchange, [position])[0]


def _permutation_matrix(pivots: Array, m: int, dtype: torch.dtype) -> Array:
    """P of A = P L U."""
    order = hlo.expand_dims(_permutation(pivots, m), -2)
    return hlo.convert(hlo.iota((m, m), 0).eq(order), dtype)


def permute_rows(x: Array, order: Array) -> Array:
    """Row i of the result is row order[i] of `x`."""
    batch = list(range(x.ndim - 2))
    return structured.gather(
        x,
        hlo.expand_dims(order, -1),
        offset_dims=[x.ndim - 1],
        collapsed_slice_dims=[x.ndim - 2],
        start_index_map=[x.ndim - 2],
        slice_sizes=[*[1] * (x.ndim - 1), x.shape[-1]],
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
    )


def _inverse_order(order: Array) -> Array:
    columns = structured.sort([order, hlo.iota(order.shape, order.ndim - 1)], -1, lambda a, b, *_: a < b)
    return columns[1]


def _solve_with_lu(lu: Array, pivots: Array, b: Array, *, left: bool, adjoint_of_a: bool) -> Array:
    """Solves A x = b, Aᴴ x = b, or (not `left`) x A = b, x Aᴴ = b, with A = P L U."""
    if not left:
        return adjoint(_solve_with_lu(lu, pivots, adjoint(b), left=True, adjoint_of_a=not adjoint_of_a))
    order = _permutation(pivots, lu.shape[-2])
    if adjoint_of_a:
        half = lapack.trsm(lu, b, left=True, upper=True, unit=False, transpose="C")
        return permute_rows(
            lapack.trsm(lu, half, left=True, upper=False, unit=True, transpose="C"), _inverse_order(order)
        )
    half = lapack.trsm(lu, permute_rows(b, order), left=True, upper=False, unit=True)
    return lapack.trsm(lu, half, left=True, upper=True, unit=False)


@lower("linalg_lu_solve")
def linalg_lu_solve(lu: Array, pivots: Array, b: Array, *, left: bool, adjoint: bool) -> Array:
    lu, b = broadcast_batch(lu, b)
    pivots = hlo.broadcast_to(pivots, lu.shape[:-1])
    return b if b.size == 0 else _solve_with_lu(lu, pivots, b, left=left, adjoint_of_a=adjoint)


@lower("lu_unpack")
def lu_unpack(
    lu: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True, *, out: list[Spec]
) -> list[Array]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    p = _permutation_matrix(pivots, m, lu.dtype) if unpack_pivots else hlo.zeros(out[0].shape, lu.dtype)
    if not unpack_data:
        return [p, *(hlo.zeros(spec.shape, lu.dtype) for spec in out[1:])]
    lower_part = triangle(hlo.slice_in_dim(lu, 0, k, dim=-1), upper=False, diagonal=-1) + eye(m, k, lu.dtype)
    return [p, lower_part, triangle(hlo.slice_in_dim(lu, 0, k, dim=-2), upper=True)]


@lower("linalg_lu")
def linalg_lu(a: Array, *, pivot: bool, out: list[Spec], check: Check) -> list[Array]:
    lu, pivots, _ = linalg_lu_factor_ex(a, pivot=pivot, check_errors=False, check=check)
    return lu_unpack(lu, pivots, out=out)


@lower("_linalg_solve_ex")
def linalg_solve_ex(
    a: Array, b: Array, *, left: bool, check_errors: bool, out: list[Spec], check: Check
) -> list[Array]:
    """b is a vector, or a batch of them that matches the matrices, where it has a dimension less than A."""
    lu, pivots, info = lapack.getrf(a)
    if check_errors:
        require_success(info, check, "torch.linalg.solve_ex", SINGULAR)
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    columns = hlo.expand_dims(b, -1) if is_vector else b
    result = linalg_lu_solve(lu, pivots, columns, left=left, adjoint=False)
    return [hlo.reshape(result, out[0].shape), lu, pivots, info]


@lower("linalg_inv_ex")
def linalg_inv_ex(a: Array, *, check_errors: bool, check: Check) -> list[Array]:
    lu, pivots, info = lapack.getrf(a)
    if check_errors:
        require_success(info, check, "torch.linalg.inv_ex", SINGULAR)
    identity = hlo.broadcast_to(eye(a.shape[-1], a.shape[-1], a.dtype), a.shape)
    return [linalg_lu_solve(lu, pivots, identity, left=True, adjoint=False), info]


# Determinants are written with tensors because their derivatives want the factorisation of Aᵀ where A is real and
# contiguous (row-major A is column-major Aᵀ), which only a tensor's strides tell.


def _lu_of(a: Tensor) -> tuple[Tensor, Tensor]:
    transposed = a.is_contiguous() and not a.is_complex()
    return torch.ops.aten.linalg_lu_factor_ex(a.mT if transposed else a)[:2]


def _sign_of(pivots: Tensor, dtype: torch.dtype) -> Tensor:
    """The permutation's determinant."""
    in_place = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * ((pivots != in_place).sum(-1) % 2)).to(dtype)


@decompose("_linalg_det")
def linalg_det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots = _lu_of(a)
    return _sign_of(pivots, a.dtype) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


@decompose("_linalg_slogdet")
def linalg_slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots = _lu_of(a)
    diagonal = lu.diagonal(0, -2, -1)
    sign = _sign_of(pivots, a.dtype) * torch.sgn(diagonal).prod(-1)
    return sign, diagonal.abs().log().sum(-1), lu, pivots
