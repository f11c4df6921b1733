"""The forms that factorisations have on TPUs, run on XLA:CPU. "LuDecomposition" is a TPU's alone: only compiled."""

import pytest
import torch

from tools.compare import assert_same, forms_for_tpus, to_device

SINGLE = (torch.float32, torch.complex64)
DTYPES = (torch.float32, torch.complex128)
TOLERANCE = {torch.float32: 2e-5, torch.complex64: 2e-5, torch.complex128: 1e-13}


@pytest.fixture(autouse=True)
def _programs_for_tpus():
    with forms_for_tpus():
        yield


def close(got, want, dtype):
    assert_same(got, want, strides=False, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def hermitian(*shape, dtype):
    a = torch.randn(*shape, dtype=dtype)
    return a + a.mH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 5), (7, 4), (3, 8)])
def test_qr(shape, dtype):
    a = torch.randn(shape, dtype=dtype)
    factors, tau = torch.geqrf(a)
    close(torch.geqrf(a.to("tpu")), (factors, tau), dtype)
    for mode in ("reduced", "complete", "r"):
        close(torch.linalg.qr(a.to("tpu"), mode=mode), torch.linalg.qr(a, mode=mode), dtype)
    c = torch.randn(*shape[:-2], shape[-2], 3, dtype=dtype)
    for transpose in (False, True):
        want = torch.ormqr(factors, tau, c, True, transpose)
        close(torch.ormqr(*to_device((factors, tau, c)), True, transpose), want, dtype)


@pytest.mark.parametrize("dtype", SINGLE)
def test_eigenvalues_of_hermitian_matrices(dtype):
    for a in (hermitian(2, 9, 9, dtype=dtype), hermitian(1, 1, dtype=dtype), torch.zeros(3, 3, dtype=dtype)):
        for uplo in "UL":
            w, v = torch.linalg.eigh(a.to("tpu"), UPLO=uplo)
            v = v.cpu()
            close(w, torch.linalg.eigvalsh(a, UPLO=uplo), dtype)
            close(v @ (w.cpu().unsqueeze(-1) * v.mH), a, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((6, 6), SINGLE[0]), ((2, 7, 3), SINGLE[0]), ((3, 8), SINGLE[1]), ((1, 1), SINGLE[0]), ((9, 1), SINGLE[0])],
)
def test_singular_values(shape, dtype):
    a = torch.randn(shape, dtype=dtype)
    deficient = a[..., :1] @ torch.randn(*shape[:-2], 1, shape[-1], dtype=dtype)
    for matrix in (a, deficient, torch.zeros_like(a), 1e-12 * a, torch.diag_embed(torch.arange(4).to(dtype))):
        for full in (False, True):
            u, s, vh = (t.cpu() for t in torch.linalg.svd(matrix.to("tpu"), full_matrices=full))
            size = float(matrix.norm()) or 1.0
            close(s / size, torch.linalg.svdvals(matrix) / size, dtype)
            k = s.shape[-1]
            close(u[..., :k] @ (s.unsqueeze(-1) * vh[..., :k, :]) / size, matrix / size, dtype)
            for q in (u.mH @ u, vh @ vh.mH):
                close(q, torch.eye(q.shape[-1], dtype=dtype).expand_as(q), dtype)


def test_gradients():
    for function in (torch.linalg.svdvals, torch.linalg.qr, torch.linalg.pinv):
        a = torch.randn(5, 4, dtype=torch.float32)
        results = []
        for device in ("cpu", "tpu"):
            x = a.clone().to(device).requires_grad_()
            y = function(x)
            sum((t * t).sum() * (i + 1) for i, t in enumerate(y if isinstance(y, tuple) else [y])).backward()
            results.append(x.grad)
        assert_same(results[1], results[0], strides=False, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky(dtype):
    a = torch.randn(2, 6, 6, dtype=dtype)
    a = a @ a.mH + torch.eye(6, dtype=dtype)
    for upper in (False, True):
        factor = torch.linalg.cholesky(a, upper=upper)
        close(torch.linalg.cholesky(a.to("tpu"), upper=upper), factor, dtype)
        b = torch.randn(2, 6, 2, dtype=dtype)
        want = torch.linalg.solve_triangular(factor, b, upper=upper)
        close(torch.linalg.solve_triangular(*to_device((factor, b)), upper=upper), want, dtype)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(-torch.eye(3, dtype=dtype, device="tpu"))


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_says_which_minor_is_not_positive_definite(dtype, upper):
    a = torch.eye(5).repeat(6, 1, 1)
    a[1, 2, 2] = a[2, 0, 0] = 0
    a[3, 4, 0] = 1  # the fifth pivot is 1 - 1
    a[4, 3, 3] = -2
    a[5, 2, 0] = float("nan")
    a = a.to(dtype).mH if upper else a.to(dtype)
    info = torch.linalg.cholesky_ex(a, upper=upper).info
    assert info.tolist() == [0, 3, 1, 5, 4, 3]
    assert torch.equal(torch.linalg.cholesky_ex(a.to("tpu"), upper=upper).info.cpu(), info)
    for matrix in a[1:]:
        with pytest.raises(torch.linalg.LinAlgError) as want:
            torch.linalg.cholesky(matrix, upper=upper)
        with pytest.raises(torch.linalg.LinAlgError) as got:
            torch.linalg.cholesky(matrix.to("tpu"), upper=upper)
        assert str(got.value) == str(want.value)


def test_double_precision_is_left_to_the_cpu(monkeypatch):
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    a = hermitian(3, 3, dtype=torch.float64).to("tpu")
    for function in (torch.linalg.eigh, torch.linalg.svd):
        with pytest.raises(NotImplementedError, match="eigenvectors have single precision only"):
            function(a)
