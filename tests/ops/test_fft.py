"""Discrete Fourier transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.compare import check, check_opinfo

# Another algorithm than the CPU's: float32 rounding of sums over a few hundred elements. PyTorch's meta kernel lays
# results out as on CUDA, not as on the CPU.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "strides": False}
NAMES = [f"{kind}{n}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for n in ("", "2", "n")]


@pytest.mark.parametrize("name", NAMES)
def test_database(name: str) -> None:
    check_opinfo(f"fft.{name}", (torch.float32,), samples=3, **CLOSE)
    check_opinfo(f"fft.{name}", (torch.complex64, torch.int64), samples=1, **CLOSE)


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_more_dimensions_than_xla_transforms_at_once(name: str, norm: str) -> None:
    dtype = torch.float32 if name == "rfftn" else torch.complex64
    x = torch.randn(2, 3, 4, 5, 6, dtype=dtype).requires_grad_()
    function: Any = getattr(torch.fft, name)
    check(lambda x: function(x, norm=norm), x, **CLOSE)
    check(lambda x: function(x, dim=(3, 0, 1), norm=norm), x, **CLOSE)


@pytest.mark.parametrize("n", [1, 2, 7, 16, 97])
def test_double_precision_of_any_length(n: int) -> None:
    real, complex_ = torch.randn(3, n, dtype=torch.float64), torch.randn(3, n, dtype=torch.complex128)
    for function, x in (
        (torch.fft.rfft, real),
        (torch.fft.fft, real),
        (torch.fft.fft, complex_),
        (torch.fft.ifft, complex_),
    ):
        check(function, x.requires_grad_())
    check(lambda x: torch.fft.irfft(x, n=n), torch.randn(3, n // 2 + 1, dtype=torch.complex128).requires_grad_())


def test_round_trip_in_one_dtype() -> None:
    x = torch.randn(4, 100)
    y = torch.fft.irfft(torch.fft.rfft(x.to("tpu")), n=100)
    torch.testing.assert_close(y.cpu(), x, rtol=1e-5, atol=1e-6)


def test_empty_and_padded() -> None:
    # MKL refuses an empty batch.
    assert torch.fft.rfft(torch.randn(0, 5, device="tpu"), n=8).cpu().shape == (0, 5)
    check(lambda x: torch.fft.rfft(x, n=8), torch.randn(3, 5).requires_grad_(), **CLOSE)
    check(lambda x: torch.fft.irfft(x, n=5), torch.randn(3, 7, dtype=torch.complex64).requires_grad_(), **CLOSE)


def test_transformed_views() -> None:
    x = torch.randn(4, 6, 5, dtype=torch.complex64)
    check(lambda x: torch.fft.fft(x.conj().transpose(0, 2)[::2], dim=1), x, **CLOSE)


@pytest.mark.parametrize("center", [True, False])
def test_short_time_transform_and_back(center: bool) -> None:
    def run(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 16, hop_length=4, window=window, center=center, return_complex=True)

    check(run, torch.randn(2, 100).requires_grad_(), torch.hann_window(16), **CLOSE)

    def back(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        return torch.istft(torch.stft(x, 16, 4, window=window, return_complex=True), 16, 4, window=window, length=100)

    check(back, torch.randn(2, 100), torch.hann_window(16), **CLOSE)
