"""Gradients of gamma and Dirichlet variates by their parameters."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check, no_fallback

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma(dtype: torch.dtype) -> None:
    """Shapes on both sides of each border between approximations."""
    torch.manual_seed(0)
    alpha = torch.tensor([0.01, 0.3, 1, 3, 7.9, 8.1, 20, 200], dtype=dtype).repeat_interleave(50)
    check(torch._standard_gamma_grad, alpha, torch._standard_gamma(alpha))
    check(torch._standard_gamma_grad, torch.tensor([10.0, 10, 2], dtype=dtype), torch.tensor([10.0, 0, 0], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dirichlet(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pairs = [[0.02, 0.5], [0.5, 3], [3, 0.4], [7, 9], [20, 30], [2, 2], [100, 3], [5, 5]]
    alpha = torch.tensor(pairs, dtype=dtype).repeat(50, 1)
    check(torch._dirichlet_grad, torch._sample_dirichlet(alpha), alpha, alpha.sum(-1, True).expand_as(alpha))
    middle = torch.tensor([[0.4, 0.6], [0.5, 0.5]], dtype=dtype)
    shapes = torch.tensor([[20.0, 30], [8, 8]], dtype=dtype)
    check(torch._dirichlet_grad, middle, shapes, shapes.sum(-1, True).expand_as(shapes))


def test_distributions_learn_their_parameters() -> None:
    """The gradient of a mean of samples: by theory the mean's own."""
    torch.manual_seed(0)
    shape = torch.full((20000,), 2.5, device="tpu", requires_grad=True)
    with no_fallback():
        torch.distributions.Gamma(shape, torch.tensor(2.0, device="tpu")).rsample().sum().backward()
    assert abs(shape.grad.mean().item() - 1 / 2.0) < 0.02
    weights = torch.tensor([1.0, 2.0, 3.0], device="tpu").repeat(20000, 1).requires_grad_()
    with no_fallback():
        torch.distributions.Dirichlet(weights).rsample()[:, 0].sum().backward()
    # d/da_i of a_0 / total.
    expected = torch.tensor([1 / 6 - 1 / 36, -1 / 36, -1 / 36])
    torch.testing.assert_close(weights.grad.mean(0).cpu(), expected, rtol=0, atol=0.005)
