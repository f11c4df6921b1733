"""Factorisation of indefinite symmetric matrices."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check


def symmetric(dtype: torch.dtype, hermitian: bool) -> torch.Tensor:
    """With pivots of one row, of none (a zero matrix), and of two rows (a zero diagonal)."""
    torch.manual_seed(0)
    a = torch.randn(3, 5, 5, dtype=dtype)
    a = a + (a.mH if hermitian else a.mT)
    a[0] += 5 * torch.eye(5)
    a[1] = 0
    a[2].diagonal().zero_()
    return a


@pytest.mark.parametrize(
    ("dtype", "hermitian"),
    [(torch.float32, False), (torch.float64, False), (torch.complex128, False), (torch.complex128, True)],
)
def test_factor_and_solve(dtype: torch.dtype, hermitian: bool) -> None:
    a = symmetric(dtype, hermitian)
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
    check(lambda a: torch.linalg.ldl_factor_ex(a, hermitian=hermitian), a, **tolerances)
    factor, pivots, info = torch.linalg.ldl_factor_ex(a, hermitian=hermitian)
    assert info.tolist() == [0, 1, 0]
    assert (pivots[2] < 0).any()
    factor, pivots = factor[::2], pivots[::2]
    b = torch.randn(2, 5, 3, dtype=dtype)
    check(lambda f, p, b: torch.linalg.ldl_solve(f, p, b, hermitian=hermitian), factor, pivots, b, **tolerances)
