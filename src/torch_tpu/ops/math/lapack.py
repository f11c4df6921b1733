"""LAPACK's factorisations of (batches of) matrices as XLA custom calls; where there is no LAPACK, XLA's own.

Each function takes and returns matrices in logical order; the calls see them column-major, as LAPACK wants. `info` is
LAPACK's: 0 for success, i > 0 where the i-th pivot failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured, types
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Check
from torch_tpu.ops.math import factor_on_tpu
from torch_tpu.ops.math.matrices import eye, eye_of

_PREFIX = {torch.float32: "s", torch.float64: "d", torch.complex64: "c", torch.complex128: "z"}
Result = tuple[tuple[int, ...], torch.dtype]


def on_lapack() -> bool:
    """Whether programs run where LAPACK can be called."""
    return module.target().lapack


def _by_xla(*operands: Array, platforms: Sequence[str] = ("cpu", "tpu")) -> bool:
    """Whether the compiler's own algorithms stand in for LAPACK, and there is something to compute.

    Args:
        platforms: those whose compiler has the algorithm.
    """
    target = module.target()
    known = target.platform in platforms and not target.lapack
    return known and operands[0].dtype in _PREFIX and all(a.size for a in operands)


def _layout(shape: Sequence[int], batch: int) -> tuple[int, ...]:
    """Minor to major: matrices by columns, everything else by rows."""
    ndim = len(shape)
    order = list(range(ndim - 1, -1, -1))
    if ndim - batch == 2:
        order[:2] = [ndim - 2, ndim - 1]
    return tuple(order)


def _call(
    name: str, operands: Sequence[Array], results: Sequence[Result], attributes: Mapping[str, bool | str] | None = None
) -> list[Array]:
    """Calls `name` in the operands' precision. Without elements there is nothing to compute: zeros."""
    if any(a.size == 0 for a in operands):
        return [hlo.zeros(shape, dtype) for shape, dtype in results]
    if not on_lapack():
        raise NotImplementedError(f"LAPACK's {name} has no counterpart on this platform")
    if operands[0].dtype not in _PREFIX:
        raise RuntimeError(f"Low precision dtypes not supported. Got {operands[0].dtype}")
    batch = operands[0].ndim - 2
    return structured.custom_call(
        f"lapack_{_PREFIX[operands[0].dtype]}{name}_ffi",
        operands,
        results,
        attributes,
        operand_layouts=[_layout(a.shape, batch) for a in operands],
        result_layouts=[_layout(shape, batch) for shape, _ in results],
    )


def _same(a: Array) -> Result:
    return a.shape, a.dtype


def _info(a: Array) -> Result:
    return a.shape[:-2], torch.int32


def potrf(a: Array, upper: bool) -> tuple[Array, Array]:
    """The Cholesky factor in one triangle (the other one is undefined), and info."""
    if not on_lapack() and a.size:
        return factor_on_tpu.potrf(a, upper)
    factor, info = _call("potrf", [a], [_same(a), _info(a)], {"uplo": "U" if upper else "L"})
    return factor, info


def getrf(a: Array) -> tuple[Array, Array, Array]:
    """L and U in one matrix, row exchanges (counted from 1), and info."""
    if _by_xla(a, platforms=("tpu",)):
        return factor_on_tpu.getrf(a)
    *batch, m, n = a.shape
    lu, pivots, info = _call("getrf", [a], [_same(a), ((*batch, min(m, n)), torch.int32), _info(a)])
    return lu, pivots, info


def geqrf(a: Array) -> tuple[Array, Array]:
    """R above the Householder vectors of Q, and their factors tau."""
    if _by_xla(a):
        return factor_on_tpu.geqrf(a)
    *batch, m, n = a.shape
    factors, tau = _call("geqrf", [a], [_same(a), ((*batch, min(m, n)), a.dtype)])
    return factors, tau


def orgqr(a: Array, tau: Array) -> Array:
    """The first columns of the product of Householder reflections."""
    if a.size == 0 or tau.size == 0:
        return hlo.broadcast_to(eye(a.shape[-2], a.shape[-1], a.dtype), a.shape)
    if _by_xla(a):
        return factor_on_tpu.orgqr(a, tau)
    return _call("ungqr" if a.dtype.is_complex else "orgqr", [a, tau], [_same(a)])[0]


def ormqr(a: Array, tau: Array, c: Array, *, left: bool, transpose: bool) -> Array:
    """Q c, c Q or the same with the adjoint of Q, for the Q of `geqrf`."""
    attributes = {"left": left, "transpose": transpose}
    if tau.size == 0:
        return c
    if _by_xla(a, c):
        return factor_on_tpu.ormqr(a, tau, c, left=left, transpose=transpose)
    return _call("unmqr" if a.dtype.is_complex else "ormqr", [a, tau, c], [_same(c)], attributes)[0]


def gesdd(a: Array, *, full: bool, vectors: bool) -> tuple[Array, Array, Array, Array]:
    """U, singular values, Vᴴ, info, by divide and conquer."""
    *batch, m, n = a.shape
    k, real = min(m, n), types.REAL_PART.get(a.dtype, a.dtype)
    wide = full or not vectors
    u, vh = (*batch, m, m if wide else k), (*batch, n if wide else k, n)
    if a.size == 0:
        return eye_of(u, a.dtype), hlo.zeros((*batch, k), real), eye_of(vh, a.dtype), hlo.zeros(batch, torch.int32)
    if _by_xla(a):
        return factor_on_tpu.gesdd(a, full=full)
    mode = "N" if not vectors else "A" if full else "S"
    results = [_same(a), ((*batch, k), real), (u, a.dtype), (vh, a.dtype), _info(a)]
    _, s, u_array, vh_array, info = _call("gesdd", [a], results, {"mode": mode})
    return u_array, s, vh_array, info


def syevd(a: Array, *, upper: bool, vectors: bool) -> tuple[Array, Array, Array]:
    """Eigenvalues in ascending order, eigenvectors, info, of a Hermitian matrix given by one triangle."""
    if _by_xla(a):
        return factor_on_tpu.syevd(a, upper=upper)
    real = types.REAL_PART.get(a.dtype, a.dtype)
    attributes = {"mode": "V" if vectors else "N", "uplo": "U" if upper else "L"}
    name = "heevd" if a.dtype.is_complex else "syevd"
    v, w, info = _call(name, [a], [_same(a), (a.shape[:-1], real), _info(a)], attributes)
    return w, v, info


def geev(a: Array, *, vectors: bool) -> tuple[Array, Array, Array]:
    """Eigenvalues and right eigenvectors, complex, and info."""
    attributes = {"compute_left": "N", "compute_right": "V" if vectors else "N"}
    complex_dtype = types.COMPLEX_OF.get(a.dtype, a.dtype)
    matrices = [(a.shape, complex_dtype)] * 2
    values = [(a.shape[:-1], a.dtype)] * (1 if a.dtype.is_complex else 2)
    *w, _, v, info = _call("geev", [a], [*values, *matrices, _info(a)], attributes)
    return w[0] if len(w) == 1 else hlo.complex_(*w), v, info


def trsm(a: Array, b: Array, *, left: bool, upper: bool, unit: bool, transpose: str = "N") -> Array:
    """Solves op(a) x = b, or x op(a) = b, with op nothing (N), transpose (T) or adjoint (C)."""
    if not on_lapack() or a.dtype not in _PREFIX:
        form = {"N": "NO_TRANSPOSE", "T": "TRANSPOSE", "C": "ADJOINT"}[transpose]
        return structured.triangular_solve(a, b, left=left, lower=not upper, unit_diagonal=unit, transpose=form)
    sides = {"side": "L" if left else "R", "uplo": "U" if upper else "L"}
    attributes = {**sides, "diag": "U" if unit else "N", "trans_x": transpose}
    return _call("trsm", [a, b], [_same(b)], attributes)[0]


def require_success(info: Array, check: Check, name: str, failure: str) -> None:
    """States that every factorisation succeeded. `{}` in `failure` is info."""
    error = torch.linalg.LinAlgError
    if info.ndim == 0:
        check(info.eq(0), f"{name}: {failure}", error, info)
        return
    flat = hlo.reshape(info, (info.size,))
    position = hlo.select(flat.ne(0), hlo.iota(flat.shape, 0), info.size)
    first = structured.reduce_min(position, [0]) if info.size else hlo.constant(0, torch.int32)
    # One number can be told, and that is which matrix of the batch it was.
    reason = re.split(r" \((?:the leading minor|error code)", failure)[0]
    reason = reason.replace("The diagonal element {}", "A diagonal element")
    check(first >= info.size, f"{name}: (Batch element {{}}): {reason}.".replace("..", "."), error, first)


NOT_POSITIVE = (
    "The factorization could not be completed because the input is not positive-definite "
    "(the leading minor of order {} is not positive-definite)."
)
SINGULAR = "The diagonal element {} is zero, the inversion could not be completed because the input matrix is singular."
