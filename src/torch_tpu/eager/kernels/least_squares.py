"""`linalg_lstsq`: by hand, because whether it returns residuals depends on the rank it finds."""

from __future__ import annotations

import torch

from torch_tpu.eager.kernel_table import kernel

Tensor = torch.Tensor
DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


@kernel("linalg_lstsq")
def linalg_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution, residuals, rank, singular values, the last three empty where LAPACK's `driver` doesn't give them.

    gels solves by QR and takes full rank for granted; the others find the shortest solution by singular values.
    """
    driver = driver or "gelsy"
    if driver not in DRIVERS:
        raise RuntimeError(f"torch.linalg.lstsq: parameter `driver` should be one of {DRIVERS}")
    if a.dim() < 2:
        raise RuntimeError("torch.linalg.lstsq: input must have at least 2 dimensions.")
    if b.dim() < 1:
        raise RuntimeError("torch.linalg.lstsq: other must have at least 1 dimension.")
    if a.dtype is not b.dtype:
        raise RuntimeError(
            f"torch.linalg.lstsq: Expected input and other to have the same dtype, but got {a.dtype} and {b.dtype}"
        )
    is_vector = a.dim() - 1 == b.dim() and a.shape[:-1] == b.shape
    columns = b.unsqueeze(-1) if is_vector else b
    m, n = a.shape[-2:]
    if columns.dim() < 2 or columns.shape[-2] != m:
        raise RuntimeError("torch.linalg.lstsq: input.size(-2) should match other.size(-2)")
    batch = torch.broadcast_shapes(a.shape[:-2], columns.shape[:-2])
    a, columns = (t.expand(*batch, *t.shape[-2:]) for t in (a, columns))
    real = a.abs().dtype if a.is_complex() else a.dtype
    residuals, values = (torch.empty(0, dtype=real, device=a.device) for _ in range(2))
    if driver == "gels":
        x, rank, full_rank = _by_qr(a, columns), torch.empty(0, dtype=torch.int64, device=a.device), True
    else:
        tolerance = torch.finfo(a.dtype).eps * max(m, n) if rcond is None else rcond
        x, rank, found = _by_singular_values(a, columns, tolerance)
        full_rank = driver != "gelsy" and m > n and bool((rank == n).all())
        values = values if driver == "gelsy" else found
    if m > n and full_rank:
        error = (a @ x - columns).abs()
        residuals = (error * error).sum(-2)
        residuals = residuals.squeeze(-1) if is_vector else residuals
    # Column-major, as LAPACK leaves it: in the memory of the right-hand sides, which may have more rows.
    solution = x.new_empty((*x.shape[:-2], x.shape[-1], max(m, n))).mT[..., :n, :].copy_(x)
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values


def _by_qr(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[-2] >= a.shape[-1]:
        q, r = torch.linalg.qr(a)
        return torch.linalg.solve_triangular(r, q.mH @ b, upper=True)
    q, r = torch.linalg.qr(a.mH)
    return q @ torch.linalg.solve_triangular(r.mH, b, upper=False)


def _by_singular_values(a: Tensor, b: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    if s.shape[-1] == 0:
        rank = torch.zeros(s.shape[:-1], dtype=torch.int64, device=a.device)
        return b.new_zeros((*b.shape[:-2], a.shape[-1], b.shape[-1])), rank, s
    kept = s > tolerance * s[..., :1]
    inverse = torch.where(kept, 1 / s, torch.zeros_like(s)).to(a.dtype)
    return vh.mH @ (inverse.unsqueeze(-1) * (u.mH @ b)), kept.sum(-1), s
