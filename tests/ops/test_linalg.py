"""Linear algebra against the CPU. Factors that are unique only up to signs are compared by what they make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.platform_marks import lapack
from tools.compare import check, check_opinfo, no_fallback
from torch_tpu import hooks
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.plan import Plan
from torch_tpu.runtime.process_client import client

# tests/ops/test_factor_on_tpu.py has what stands in for LAPACK, tests/plugin/ what runs on the host.

CLOSE = {"rtol": 2e-3, "atol": 1e-4}
DOUBLE = {"rtol": 1e-7, "atol": 1e-8}


def _both(name: str, samples: int = 3) -> None:
    check_opinfo(name, samples=samples, strides=False, **CLOSE)
    check_opinfo(name, (torch.float64, torch.complex128), samples=samples, strides=False, **DOUBLE)


@pytest.mark.parametrize("name", [
    "linalg.cholesky", "linalg.cholesky_ex", "cholesky", "cholesky_inverse", "cholesky_solve", "triangular_solve",
    "linalg.solve_triangular", "linalg.householder_product", "geqrf", "ormqr", "linalg.qr", "lu_unpack",
    "linalg.lu_solve", "linalg.cross", "linalg.matrix_power", "linalg.vander",
    *(pytest.param(name, marks=lapack) for name in (
        "linalg.lu_factor", "linalg.lu_factor_ex", "linalg.lu", "linalg.solve", "linalg.solve_ex", "linalg.inv",
        "linalg.inv_ex", "linalg.svdvals", "linalg.eigvalsh", "linalg.cond", "linalg.tensorinv", "linalg.lstsq",
        "linalg.matrix_norm", "linalg.det", "linalg.slogdet", "logdet",
    )),
])  # fmt: skip
def test_database(name: str) -> None:
    # The gradient of a product of reflections is a loop of many small operators.
    _both(name, samples=1 if name == "linalg.householder_product" else 3)


@lapack
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (0, 3)])
def test_pinv_and_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The database names their tolerance arguments as `check` does its own."""
    a = _matrices(shape, dtype)
    a[..., 0] = a[..., 1]
    check(lambda a: (torch.linalg.pinv(a), torch.linalg.pinv(a, rtol=0.5)), a, strides=False, **DOUBLE)
    check(lambda a: (torch.linalg.matrix_rank(a), torch.linalg.matrix_rank(a, atol=1.0)), a)
    if shape == (2, 4, 4):
        check(lambda a: torch.linalg.pinv(a @ a.mH, hermitian=True), a, strides=False, **DOUBLE)


def _matrices(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@lapack
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (1, 1), (2, 0, 3)])
def test_svd(shape: tuple[int, ...], full: bool, dtype: torch.dtype) -> None:
    a = _matrices(shape, dtype)
    m, n = shape[-2:]
    k = min(m, n)
    with no_fallback():
        u, s, vh = torch.linalg.svd(a.to("tpu"), full_matrices=full)
        assert u.shape[-2:] == ((m, m) if full else (m, k))
        assert vh.shape[-2:] == ((n, n) if full else (k, n))
        made = (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]
        orthogonal = u.mH @ u, vh @ vh.mH
    torch.testing.assert_close(s.cpu(), torch.linalg.svdvals(a), **DOUBLE)
    torch.testing.assert_close(made.cpu(), a, **DOUBLE)
    for product in orthogonal:
        torch.testing.assert_close(
            product.cpu(), torch.eye(product.shape[-1], dtype=dtype).expand(product.shape), **DOUBLE
        )


@lapack
def test_svd_gradient() -> None:
    """Of a function that doesn't depend on the vectors' signs."""

    def function(a: torch.Tensor) -> torch.Tensor:
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        return (u * s.exp().unsqueeze(-2)) @ vh

    check(function, _matrices((2, 4, 3), torch.float64).requires_grad_(), **DOUBLE)


@lapack
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigh(uplo: str, dtype: torch.dtype) -> None:
    """Only one triangle is read; the gradient is that of a function free of signs."""

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, v = torch.linalg.eigh(a, UPLO=uplo)
        return w, (v * w.exp().to(v.dtype).unsqueeze(-2)) @ v.mH

    check(function, _matrices((2, 4, 4), dtype).requires_grad_(), **DOUBLE)


@lapack
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_eig(dtype: torch.dtype) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        w, v = torch.linalg.eig(a)
        return (v * w.exp().unsqueeze(-2)) @ torch.linalg.inv(v)

    a = _matrices((2, 4, 4), dtype).requires_grad_()
    check(function, a, strides=False, rtol=1e-6, atol=1e-6)
    check(lambda a: torch.view_as_real(torch.linalg.eigvals(a)).sum(-2), a.detach(), **DOUBLE)


@pytest.mark.parametrize(("function", "matrix"), [
    (torch.linalg.cholesky, [[1.0, 2.0], [2.0, 1.0]]),
    (torch.cholesky, [[1.0, 2.0], [2.0, 1.0]]),
    (torch.cholesky_inverse, [[1.0, 0.0], [2.0, 0.0]]),
    pytest.param(torch.linalg.inv, [[1.0, 1.0], [1.0, 1.0]], marks=lapack),
    pytest.param(lambda a: torch.linalg.solve(a, a), [[1.0, 1.0], [1.0, 1.0]], marks=lapack),
    pytest.param(torch.linalg.lu_factor, [[1.0, 1.0], [1.0, 1.0]], marks=lapack),
    (torch.linalg.svd, [[1.0, float("nan")], [1.0, 1.0]]),
    (torch.linalg.eig, [[1.0, float("nan")], [1.0, 1.0]]),
])  # fmt: skip
def test_failures_are_the_same(function: Callable[..., object], matrix: list[list[float]]) -> None:
    a = torch.tensor(matrix)
    for batched in (a, torch.stack([torch.eye(2), a])):
        with pytest.raises(RuntimeError) as want:
            function(batched)
        with pytest.raises(type(want.value)) as got:
            function(batched.to("tpu"))
        if batched.dim() == 2:
            assert str(got.value) == str(want.value)


def test_info_codes() -> None:
    a = torch.stack([torch.eye(3), torch.ones(3, 3), -torch.eye(3)])
    check(lambda a: torch.linalg.cholesky_ex(a)[1], a)
    if client().calls_lapack:
        check(lambda a: torch.linalg.lu_factor_ex(a)[1:], a)
        check(lambda a: torch.linalg.inv_ex(a)[1], a)
    with pytest.raises(torch.linalg.LinAlgError, match="leading minor of order 1"):
        torch.linalg.cholesky_ex(a[2].to("tpu"), check_errors=True)


@lapack
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("left", [True, False])
def test_gradient_of_solve_for_either_layout(left: bool, layout: str) -> None:
    a, b = _matrices((3, 3), torch.float64), _matrices((3, 3), torch.float64)
    if layout == "columns":
        a = a.T.contiguous().T
    check(lambda a, b: torch.linalg.solve(a, b, left=left), a.requires_grad_(), b.requires_grad_(), strides=False)
    check(lambda a: (torch.linalg.det(a), torch.linalg.slogdet(a)), a, strides=False)


@lapack
@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_least_squares(shape: tuple[int, int], driver: str) -> None:
    a, b = _matrices((2, *shape), torch.float64), _matrices((2, shape[0], 2), torch.float64)
    check(lambda a, b: tuple(torch.linalg.lstsq(a, b, driver=driver)), a, b, strides=False, **DOUBLE)
    if driver != "gels":
        a[:, :, 0] = a[:, :, 1]
        # The CPU's gelsy finds rank 1 here, with a bigger error than gelsd's.
        want = torch.linalg.lstsq(a, b, driver="gelsd")
        got = torch.linalg.lstsq(a.to("tpu"), b.to("tpu"), driver=driver)
        torch.testing.assert_close(got.solution.cpu(), want.solution, **DOUBLE)
        assert torch.equal(got.rank.cpu(), want.rank)


def test_matrix_exp_of_large_and_small_norms() -> None:
    a = _matrices((4, 3, 3), torch.float64) * torch.tensor([1e-8, 0.1, 3.0, 30.0], dtype=torch.float64)[:, None, None]
    check(torch.linalg.matrix_exp, a, rtol=1e-9, atol=0)
    check_opinfo("matrix_exp", (torch.float64, torch.complex128), samples=3, **DOUBLE)
    exact = torch.linalg.matrix_exp(a[:3])
    error = torch.linalg.matrix_exp(a[:3].float().to("tpu")).cpu().double() - exact
    assert (error.abs().amax((-2, -1)) < 1e-5 * exact.abs().amax((-2, -1))).all()
    check(torch.linalg.matrix_exp, torch.full((2, 2), float("nan")))
    for dtype in (torch.bfloat16, torch.float16):
        half = a[:3].to(dtype)
        rounded = torch.linalg.matrix_exp(half.float()).to(dtype)
        torch.testing.assert_close(torch.linalg.matrix_exp(half.to("tpu")).cpu(), rounded)


@lapack
def test_float32_stays_float32() -> None:
    a = _matrices((3, 3), torch.float32)
    for result in (*torch.linalg.svd(a.to("tpu")), *torch.linalg.qr(a.to("tpu")), torch.linalg.inv(a.to("tpu"))):
        assert result.dtype is torch.float32
    with pytest.raises(RuntimeError, match="Low precision"):
        torch.linalg.inv(a.half().to("tpu"))


def test_least_squares_solutions_lie_where_the_right_hand_sides_did() -> None:
    for shape in ((4, 3), (5, 4, 3), (3, 4), (5, 3, 3)):
        check(lambda a, b: torch.linalg.lstsq(a, b).solution, torch.randn(shape), torch.randn(*shape[:-1], 2))
    check(lambda a, b: torch.linalg.lstsq(a, b).solution, torch.randn(5, 4, 3), torch.randn(5, 4))


@pytest.mark.parametrize("function", [torch.linalg.svdvals, torch.linalg.eigvalsh])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3, 3)])
def test_messages_of_failures_take_the_one_number_there_is(
    function: Callable[[torch.Tensor], object], shape: tuple[int, ...]
) -> None:
    """LAPACK's iterations hardly ever fail to converge, so what such an error would say is made here."""
    hooks.forget_programs()
    function(torch.eye(3, device="tpu").expand(shape).contiguous())
    plans = [p for p in plan_table.plans.values() if isinstance(p, Plan)]
    said = [m.format(2) for p in plans for _, m, error, _ in p.checks if error is torch.linalg.LinAlgError]
    assert any("failed to converge" in m for m in said)
    assert all(("(Batch element 2)" in m) == (len(shape) > 2) or "non-finite values" in m for m in said)
