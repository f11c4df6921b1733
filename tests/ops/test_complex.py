"""What complex numbers can't do, and what they do best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

F = torch.nn.functional

REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "atan2": lambda z: torch.atan2(z, z),
    "ceil": torch.ceil,
    "clamp": lambda z: torch.clamp(z, z, z),
    "copysign": lambda z: torch.copysign(z, z),
    "erf": torch.erf,
    "fmax": lambda z: torch.fmax(z, z),
    "frac": torch.frac,
    "gcd": lambda z: torch.gcd(z, z),
    "greater": lambda z: z > 1,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "hypot": lambda z: torch.hypot(z, z),
    "logit": torch.logit,
    "maximum": lambda z: torch.maximum(z, z),
    "round": torch.round,
    "sign": torch.sign,
    "sort": torch.sort,
    "foreach abs_": lambda z: torch._foreach_abs_([z]),
    "foreach ceil": lambda z: torch._foreach_ceil([z]),
    "foreach maximum": lambda z: torch._foreach_maximum([z], [z]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_complex_numbers_have_no_order(name: str) -> None:
    """XLA compiles some of these, and ends the process at others."""
    z = torch.tensor([1 + 2j, -3j])
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as on_host:
        REFUSED[name](z)
    with pytest.raises(on_host.type):
        REFUSED[name](z.tpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_matrix_exponential_is_as_exact_as_its_numbers(dtype: torch.dtype) -> None:
    """Against double precision, for norms from 0.1 to 30."""
    torch.manual_seed(0)
    a = torch.randn(6, 8, 8, dtype=dtype) * torch.logspace(-2, 0.6, 6).reshape(6, 1, 1)
    exact = torch.linalg.matrix_exp(a.to(torch.complex128))
    error = (torch.linalg.matrix_exp(a.tpu()).cpu() - exact).abs().amax((-2, -1)) / exact.abs().amax((-2, -1))
    assert error.max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("order", [torch.inf, -torch.inf])
def test_the_gradient_of_a_largest_modulus_finds_it_again(dtype: torch.dtype, order: float) -> None:
    """It compares |x| with the norm, which another program, compiled with other options for its size, has computed."""
    xs = [torch.randn(n, n, dtype=dtype) for n in (30, 20, 12, 8, 3, 1)]
    on_device = [t.to("tpu").requires_grad_() for t in xs]
    torch.stack(torch._foreach_norm(on_device, order)).sum().backward()
    for t, got in zip(xs, on_device, strict=True):
        want = t.clone().requires_grad_()
        torch.linalg.vector_norm(want, order).backward()
        torch.testing.assert_close(got.grad.cpu(), want.grad)


def test_modulus_of_single_precision_is_rounded_correctly() -> None:
    x = torch.randn(1000, dtype=torch.complex64)
    want = x.to(torch.complex128).abs().float()
    assert torch.equal(x.to("tpu").abs().cpu(), want)
    assert torch.equal(x[:50].to("tpu").abs().cpu(), want[:50])
