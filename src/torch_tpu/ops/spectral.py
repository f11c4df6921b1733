"""QR, singular value and eigenvalue decompositions, the pseudo-inverse and the matrix exponential."""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Check, Spec, decompose, lower
from torch_tpu.ops.math import lapack
from torch_tpu.ops.math.lapack import require_success
from torch_tpu.ops.math.matrices import eye, triangle
from torch_tpu.ops.matmul import matrix_product

# --- QR ----------------------------------------------------------------------------------------------------------


@lower("geqrf")
def geqrf(a: Array) -> list[Array]:
    return list(lapack.geqrf(a))


@lower("linalg_householder_product")
def linalg_householder_product(a: Array, tau: Array) -> Array:
    return lapack.orgqr(a, tau)


@lower("ormqr")
def ormqr(a: Array, tau: Array, other: Array, left: bool = True, transpose: bool = False) -> Array:
    return other if other.size == 0 else lapack.ormqr(a, tau, other, left=left, transpose=transpose)


@lower("linalg_qr")
def linalg_qr(a: Array, mode: str = "reduced", *, out: list[Spec]) -> list[Array]:
    m, n = a.shape[-2:]
    factors, tau = lapack.geqrf(a)
    rows = m if mode == "complete" else min(m, n)
    r = triangle(hlo.slice_in_dim(factors, 0, rows, dim=-2), upper=True)
    if mode == "r":
        return [hlo.zeros(out[0].shape, a.dtype), r]
    missing = rows - n
    padding = [*[0] * (a.ndim - 1), missing]
    vectors = hlo.pad(factors, 0, [0] * a.ndim, padding)  # Negative where columns are cut.
    return [lapack.orgqr(vectors, tau), r]


# --- singular values and eigenvalues -----------------------------------------------------------------------------


def _require_finite(a: Array, check: Check, message: str, error: type[Exception]) -> None:
    finite = hlo.is_finite(hlo.real(a)) & hlo.is_finite(hlo.imag(a))
    check(structured.reduce_and(finite, list(range(a.ndim))), message, error)


@lower("_linalg_svd")
def linalg_svd(
    a: Array,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None,
    out: list[Spec],
    check: Check,
) -> list[Array]:
    message = "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
    _require_finite(a, check, message, torch.linalg.LinAlgError)
    u, s, vh, info = lapack.gesdd(a, full=full_matrices, vectors=compute_uv)
    require_success(
        info,
        check,
        "linalg.svd",
        "The algorithm failed to converge because the input matrix is ill-conditioned or has too many repeated "
        "singular values (error code: {}).",
    )
    return [u, s, vh] if compute_uv else [hlo.zeros(out[0].shape, a.dtype), s, hlo.zeros(out[2].shape, a.dtype)]


@lower("_linalg_eigh")
def linalg_eigh(a: Array, uplo: str = "L", compute_v: bool = True, *, out: list[Spec], check: Check) -> list[Array]:
    w, v, info = lapack.syevd(a, upper=uplo.upper() == "U", vectors=compute_v)
    require_success(
        info,
        check,
        "linalg.eigh",
        "The algorithm failed to converge because the input matrix is ill-conditioned or has too many repeated "
        "eigenvalues (error code: {}).",
    )
    return [w, v if compute_v else hlo.zeros(out[1].shape, a.dtype)]


def _geev(a: Array, check: Check, *, vectors: bool) -> tuple[Array, Array]:
    _require_finite(a, check, "torch.linalg.eig: input tensor should not contain infs or NaNs.", RuntimeError)
    w, v, info = lapack.geev(a, vectors=vectors)
    require_success(
        info,
        check,
        "linalg.eig",
        "The algorithm failed to converge because the input matrix is ill-conditioned or has too many repeated "
        "eigenvalues (error code: {}).",
    )
    return w, v


@lower("linalg_eig")
def linalg_eig(a: Array, *, check: Check) -> list[Array]:
    return list(_geev(a, check, vectors=True))


@lower("_linalg_eigvals")
def linalg_eigvals(a: Array, *, check: Check) -> Array:
    return _geev(a, check, vectors=False)[0]


# --- pseudo-inverse ----------------------------------------------------------------------------------------------

Tensor = torch.Tensor


@decompose("linalg_pinv.atol_rtol_tensor")
def linalg_pinv(
    a: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """By singular values (eigenvalues of a Hermitian matrix) above max(atol, rtol · the largest)."""
    m, n = a.shape[-2:]
    if a.numel() == 0:
        return a.new_zeros((*a.shape[:-2], n, m))
    if hermitian:
        values, u = torch.linalg.eigh(a)
        vh = u.mH
    else:
        u, values, vh = torch.linalg.svd(a, full_matrices=False)
    if rtol is None:
        default = values.new_full((), torch.finfo(a.dtype).eps * max(m, n))
        rtol = default if atol is None else torch.where(atol > 0, torch.zeros_like(default), default)
    largest = values.abs().amax(-1, keepdim=True)
    tolerance = rtol.unsqueeze(-1) * largest
    if atol is not None:
        tolerance = torch.maximum(atol.unsqueeze(-1), tolerance)
    inverse = torch.where(values.abs() > tolerance, values.reciprocal(), torch.zeros_like(values)).to(a.dtype)
    return vh.mH @ (inverse.unsqueeze(-1) * u.mH)


# --- matrix exponential ------------------------------------------------------------------------------------------

# Taylor polynomials of this degree are exact to double and to single precision up to these norms (Bader, Blanes & Casas
# 2019, table 1). Each squaring that a larger norm saves halves the rounding error.
_DEGREE, _NORM, _NORM_IN_SINGLE = 19, 1.09, 3.01


@lower("linalg_matrix_exp")
def linalg_matrix_exp(a: Array) -> Array:
    """Scaling by 2⁻ˢ to a small norm, a Taylor polynomial, s squarings; s is each matrix's own."""
    if a.size == 0:
        return a
    a = hlo.convert(a, compute_dtype(a.dtype))
    n, batch = a.shape[-1], a.shape[:-2]
    norm = structured.reduce_max(structured.reduce_sum(hlo.abs_(a), [a.ndim - 2]), [a.ndim - 2])
    largest = _NORM if norm.dtype is torch.float64 else _NORM_IN_SINGLE
    squarings = hlo.maximum(hlo.ceil(hlo.log(norm / largest) / math.log(2)), 0)
    squarings = hlo.select(hlo.is_finite(squarings), squarings, 0)
    scale = hlo.convert(hlo.power(hlo.full_like(norm, 2), -squarings), a.dtype)
    x = a * hlo.expand_dims(scale, -1, -2)
    result = _taylor(x, hlo.broadcast_to(eye(n, n, a.dtype), a.shape))
    count = structured.reduce_max(squarings, list(range(len(batch))))

    def square(i: Array, result: Array) -> list[Array]:
        wanted = hlo.expand_dims(i < squarings, -1, -2)
        return [i + 1, hlo.select(wanted, matrix_product(result, result), result)]

    return structured.while_loop([hlo.full_like(count, 0), result], lambda i, _: i < count, square)[1]


def _taylor(x: Array, one: Array) -> Array:
    """Σ xᵏ/k! by Paterson & Stockmeyer: a polynomial in x⁴ whose coefficients are cubic polynomials in x."""
    square = matrix_product(x, x)
    powers = [one, x, square, matrix_product(square, x)]
    fourth = matrix_product(square, square)
    result = None
    for start in range(_DEGREE - 3, -1, -4):
        terms = [p * (1 / math.factorial(start + i)) for i, p in enumerate(powers)]
        chunk = terms[0] + terms[1] + terms[2] + terms[3]
        result = chunk if result is None else matrix_product(result, fourth) + chunk
    assert result is not None
    return result
