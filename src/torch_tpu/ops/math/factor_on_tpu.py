"""Factorisations of (batches of) matrices as XLA knows them, for where there is no LAPACK, with LAPACK's results.

XLA replaces calls of "Qr", "ProductOfElementaryHouseholderReflectors" and "Eigh" by loops, on every platform;
"LuDecomposition" on TPUs only. What they take and return is what JAX (`jax._src.lax.linalg`) writes and reads.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured, types
from torch_tpu.hlo.array import Array
from torch_tpu.ops.math.matrices import adjoint, diagonal, eye, triangle
from torch_tpu.ops.matmul import matrix_product

# Jacobi's method makes at most so many sweeps, and ends at this relative size off the diagonal, as JAX has it.
_SWEEPS, _TOLERANCE = 100, "1e-6"

Factors = tuple[Array, Array, Array]


def _real(dtype: torch.dtype) -> torch.dtype:
    return types.REAL_PART.get(dtype, dtype)


# --- Cholesky ----------------------------------------------------------------------------------------------------


def potrf(a: Array, upper: bool) -> tuple[Array, Array]:
    """The Cholesky factor in one triangle, and the order of the first leading minor that is not positive definite."""
    factor = structured.cholesky(a, lower=not upper)
    pivots = hlo.real(diagonal(factor))
    failed = ~structured.reduce_and(pivots > 0, [pivots.ndim - 1])
    # XLA only says that a matrix failed. Where, is looked for when one did.
    (order,) = structured.conditional(
        structured.reduce_or(failed, list(range(failed.ndim))),
        lambda: _order_of_failure(adjoint(a) if upper else a),
        lambda: hlo.zeros(failed.shape, torch.int32),
        [(failed.shape, torch.int32)],
    )
    return factor, hlo.select(failed, order, 0)


def _order_of_failure(a: Array) -> Array:
    """Eliminates one column after the other: the order of the first leading minor whose pivot is not positive."""
    n, last = a.shape[-1], a.ndim - 1

    def entry(x: Array, k: Array) -> Array:
        return structured.reduce_sum(hlo.select(hlo.iota(x.shape, x.ndim - 1).eq(k), x, 0), [x.ndim - 1])

    def eliminate(k: Array, rest: Array, order: Array) -> list[Array]:
        column = entry(rest, k)
        pivot = hlo.real(entry(column, k))
        order = hlo.select(order.eq(0) & ~(pivot > 0), k + 1, order)
        product = hlo.expand_dims(column, -1) * hlo.expand_dims(hlo.conj(column), -2)
        return [rest - product / hlo.convert(hlo.expand_dims(pivot, -1, -2), rest.dtype), order]

    below = triangle(a, upper=False)
    order = structured.fori_loop(n, eliminate, [below, hlo.zeros(a.shape[: last - 1], torch.int32)])[1]
    return hlo.select(order.eq(0), n, order)  # another order of the sums decided


# --- LU and QR ---------------------------------------------------------------------------------------------------


def getrf(a: Array) -> Factors:
    """L and U in one matrix, row exchanges (counted from 1), and the place of the first zero on U's diagonal."""
    *batch, m, n = a.shape
    k = min(m, n)
    results = [(a.shape, a.dtype), ((*batch, k), torch.int32), ((*batch, m), torch.int32)]
    lu, pivots, _ = structured.compiler_call("LuDecomposition", [a], results, api_version=2)
    pivot = diagonal(hlo.slice_in_dim(hlo.slice_in_dim(lu, 0, k, dim=-1), 0, k, dim=-2))
    place = hlo.select(pivot.eq(0), hlo.iota((k,), 0) + 1, k + 1)
    first = structured.reduce_min(place, [place.ndim - 1])
    return lu, pivots + 1, hlo.select(first <= k, first, 0)


def geqrf(a: Array) -> tuple[Array, Array]:
    """R above the Householder vectors of Q, and their factors tau."""
    *batch, m, n = a.shape
    factors, tau = structured.compiler_call("Qr", [a], [(a.shape, a.dtype), ((*batch, min(m, n)), a.dtype)])
    return factors, tau


def orgqr(a: Array, tau: Array) -> Array:
    """The first columns of the product of Householder reflections."""
    return structured.compiler_call("ProductOfElementaryHouseholderReflectors", [a, tau], [(a.shape, a.dtype)])[0]


def ormqr(a: Array, tau: Array, c: Array, *, left: bool, transpose: bool) -> Array:
    """Q c, c Q or the same with the adjoint of Q, for the Q of `geqrf`."""
    missing = a.shape[-2] - a.shape[-1]
    q = orgqr(hlo.pad(a, 0, [0] * a.ndim, [*[0] * (a.ndim - 1), missing]), tau)
    q = adjoint(q) if transpose else q
    return matrix_product(q, c) if left else matrix_product(c, q)


def _qr(a: Array) -> tuple[Array, Array]:
    """Q with as many columns as A, which has no more of them than rows, and R."""
    n = a.shape[-1]
    factors, tau = geqrf(a)
    upper = hlo.iota((n, n), 0) <= hlo.iota((n, n), 1)
    return orgqr(factors, tau), hlo.select(upper, hlo.slice_in_dim(factors, 0, n, dim=-2), 0)


# --- eigenvalues and singular values -----------------------------------------------------------------------------


def syevd(a: Array, *, upper: bool) -> Factors:
    """Eigenvalues in ascending order, eigenvectors, info (0), of a Hermitian matrix given by one triangle."""
    real = _real(a.dtype)
    if real is torch.float64:
        # Whatever the tolerance: residuals of 1e-9 on XLA:CPU, where LAPACK's are 1e-15.
        raise NotImplementedError("XLA's eigenvectors have single precision only")
    config = f"{int(not upper)},1,{_SWEEPS},{_TOLERANCE}"
    v, w = structured.compiler_call("Eigh", [a], [(a.shape, a.dtype), (a.shape[:-1], real)], config)
    return w, v, hlo.zeros(a.shape[:-2], torch.int32)


def gesdd(a: Array, *, full: bool) -> tuple[Array, Array, Array, Array]:
    """U, singular values, Vᴴ, info (0): of A = Q R = Q (P H), from H = V S Vᴴ, as (Q P V) S Vᴴ."""
    m, n = a.shape[-2:]
    if m < n:
        v, s, uh, info = gesdd(adjoint(a), full=full)
        return adjoint(uh), s, adjoint(v), info
    if full and m > n:
        q, r = _qr(hlo.pad(a, 0, [0] * a.ndim, [*[0] * (a.ndim - 1), m - n]))
        r = hlo.slice_in_dim(hlo.slice_in_dim(r, 0, n, dim=-1), 0, n, dim=-2)
    else:
        q, r = _qr(a)
    p = _polar(r)
    h = matrix_product(adjoint(p), r)
    w, v, info = syevd((h + adjoint(h)) * 0.5, upper=False)
    s, v = (hlo.reverse(x, [x.ndim - 1]) for x in (hlo.maximum(w, 0), v))
    # Of directions that A maps to nothing, P knows nothing: U's columns are made orthonormal, the first ones stay.
    u, upper = _qr(matrix_product(p, v))
    signs = hlo.select(hlo.real(diagonal(upper)) < 0, -1, hlo.full_like(s, 1))
    u = matrix_product(hlo.slice_in_dim(q, 0, n, dim=-1), u * hlo.convert(hlo.expand_dims(signs, -2), a.dtype))
    if full and m > n:
        u = hlo.concatenate([u, hlo.slice_in_dim(q, n, m, dim=-1)], -1)
    return u, s, adjoint(v), info


def _polar(a: Array) -> Array:
    """The unitary factor of square A, by the QDWH iteration (Nakatsukasa, Bai & Gygi 2010), through QR throughout.

    Its weights follow from a lower bound of the singular values relative to the Frobenius norm. With one below which
    they are rounding errors, the weights are known before the matrix is.
    """
    n, real = a.shape[-1], _real(a.dtype)
    size = hlo.real(a * hlo.conj(a))
    norm = hlo.sqrt(structured.reduce_sum(size, [a.ndim - 2, a.ndim - 1]))
    norm = hlo.maximum(norm, torch.finfo(real).tiny)
    x = a / hlo.convert(hlo.expand_dims(norm, -1, -2), a.dtype)
    one = hlo.broadcast_to(eye(n, n, a.dtype), a.shape)
    bound = torch.finfo(real).eps / max(n, 1)
    while abs(bound - 1) > 10 * torch.finfo(real).eps:
        weight = (4 * (1 - bound**2) / bound**4) ** (1 / 3)
        root = math.sqrt(1 + weight)
        first = root + math.sqrt(8 - 4 * weight + 8 * (2 - bound**2) / (bound**2 * root)) / 2
        second = (first - 1) ** 2 / 4
        third = first + second - 1
        q, _ = _qr(hlo.concatenate([x * math.sqrt(third), one], -2))
        top, bottom = hlo.slice_in_dim(q, 0, n, dim=-2), hlo.slice_in_dim(q, n, 2 * n, dim=-2)
        step = matrix_product(top, adjoint(bottom)) * ((first - second / third) / math.sqrt(third))
        x = x * (second / third) + step
        bound = min(bound * (first + second * bound**2) / (1 + third * bound**2), 1.0)
    return x
