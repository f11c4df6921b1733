"""Special functions against the CPU: samples, poles, infinities, and both sides of every change of formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tools.compare import check, check_opinfo
from torch_tpu import metrics

BOTH = (torch.float32, torch.float64)
POINTS = torch.cat(
    [
        torch.tensor(
            [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 8.0, 5.0, 50.0, -100.3, 1e6]
        ),
        torch.linspace(-30.1, 30.2, 400, dtype=torch.float64).float(),
        torch.linspace(-2.5, 2.5, 100, dtype=torch.float64).float(),
    ]
).double()

UNARY = """
    lgamma digamma erfinv i0 special.i0e special.i1 special.i1e special.erfcx special.log_ndtr special.ndtri
    special.entr logit
"""
BESSEL = """
    bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai
"""
POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_w
"""
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch.special, name.removeprefix("special.")) for name in UNARY.split() if name != "lgamma"},
    **{name: getattr(torch.special, name) for name in BESSEL.split()},
    "lgamma": torch.lgamma,
    "trigamma": lambda x: torch.polygamma(1, x),
    "tetragamma": lambda x: torch.polygamma(2, x),
    "erfc": torch.erfc,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "atanh": torch.atanh,
}


@pytest.mark.parametrize("name", [*UNARY.split(), "special.xlog1py", "special.zeta", "igamma", "igammac"])
def test_samples(name: str) -> None:
    # The gradient of erfinv grows as exp(erfinv²): its last digits are those of erfinv times that.
    check_opinfo(name, samples=3, rtol=5e-6 if name == "erfinv" else None, atol=1e-5 if name == "erfinv" else None)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_points(name: str, dtype: torch.dtype) -> None:
    check(FUNCTIONS[name], POINTS.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_reduced_precision_computes_in_float32(dtype: torch.dtype) -> None:
    check(lambda x: [torch.lgamma(x), torch.erfc(x), torch.digamma(x)], torch.rand(20).to(dtype) + 0.1)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 5])
def test_polygamma_with_gradient(order: int) -> None:
    check(lambda x: torch.polygamma(order, x), torch.tensor([0.2, 1.5, 9.0, -0.5, -3.3]).double().requires_grad_())


def test_polygamma_where_terms_on_both_sides_of_0_cancel() -> None:
    """The 9th term of ζ(5, -8.5) is -32, the 10th 32, the sum -3.8e-5."""
    x = torch.tensor([-8.5, -0.5, -3.5, -6.75, -0.25])
    got = torch.polygamma(4, x.to("tpu")).cpu()
    torch.testing.assert_close(got, torch.polygamma(4, x.double()).float(), rtol=1e-5, atol=0)


def test_multivariate_gamma() -> None:
    check(lambda x: torch.mvlgamma(x, 3), torch.tensor([1.5, 2.0, 10.0], requires_grad=True))


@pytest.mark.parametrize("function", [torch.special.gammainc, torch.special.gammaincc])
def test_incomplete_gamma_over_its_plane(function: Callable[..., torch.Tensor]) -> None:
    values = torch.tensor([0.0, 1e-3, 0.5, 1.0, 3.0, 10.0, 100.0, 1000.0, float("inf"), float("nan"), -1.0])
    check(function, values[:, None].contiguous(), values)
    check(function, values[:, None].double().contiguous(), values.double())


def test_zeta_with_numbers() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 3.0, 4.0])
    q = torch.tensor([1.0, 0.3, -1.5, 0.0, -2.0])
    check(lambda x, q: [torch.special.zeta(x, q), torch.special.zeta(x, 2.0), torch.special.zeta(2.0, q)], x, q)


def test_products_with_logarithms() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, float("nan"), 0.0])
    y = torch.tensor([0.0, float("nan"), float("inf"), 0.0, 3.0, 1.0, -1.0])
    check(lambda x, y: [torch.xlogy(x, y), torch.special.xlog1py(x, y), torch.xlogy(0, y), torch.xlogy(2.5, y)], x, y)
    check(
        lambda x: [torch.xlogy(x, 0.0), torch.xlogy(x, 2.0), torch.special.xlog1py(1, x), torch.xlogy(x.int(), 2)],
        x[:5],
    )


def test_logit_clamps_by_eps_without_recompiling() -> None:
    x = torch.tensor([-0.5, 0.0, 0.3, 1.0, 2.0])
    check(lambda x: [torch.logit(x), torch.logit(x, 0.01), torch.logit(x, eps=0.3)], x)
    on_device = x.to("tpu")
    torch.logit(on_device, 0.1)
    before = metrics.counters().get("program", 0)
    torch.logit(on_device, 0.2)
    assert metrics.counters().get("program", 0) == before


def test_integers_become_floats() -> None:
    check(lambda i: [torch.lgamma(i), torch.special.i0(i), torch.erf(i), torch.special.entr(i)], torch.arange(1, 6))


@pytest.mark.parametrize("name", POLYNOMIALS.split())
def test_orthogonal_polynomials(name: str) -> None:
    function = getattr(torch.special, name)
    x, degrees = torch.tensor([-1.0, -0.3, 0.0, 0.5, 1.0, 1.3]), torch.tensor([-1.0, 0, 1, 2, 3, 6, 9])
    # PyTorch takes cos(n·acos x) for some degrees where this takes the recurrence.
    check(function, x[:, None].contiguous(), degrees, rtol=1e-5, atol=1e-5)
    check(lambda x, n: [function(x, 4), function(0.7, n)], x, degrees, rtol=1e-5, atol=1e-5)
    check(function, x[:, None].double().contiguous(), degrees.double())
