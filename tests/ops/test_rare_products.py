"""Products of three tensors, linear combinations, scaled products by recipe; sums with a relu; hashes; extremes."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check

aten = torch.ops.aten
X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def test_bilinear() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    weight, bias = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, requires_grad=True)
    check(torch.nn.functional.bilinear, x, y, weight, bias)
    check(torch.nn.functional.bilinear, x.detach().double()[0], y.detach().double()[0], weight.detach().double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bilinear_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, y, weight = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype), torch.randn(5, 8, 8).to(dtype)
    got = torch.nn.functional.bilinear(*(t.to("tpu") for t in (x, y, weight)))
    want = torch.nn.functional.bilinear(x.float(), y.float(), weight.float()).to(dtype)
    # Sums in another order may round to the neighbour.
    torch.testing.assert_close(got.cpu(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 8)


def test_linear_combination() -> None:
    coefficients = torch.tensor([[1.0, 2], [0, -1], [3, 0]])
    check(aten._compute_linear_combination, X, coefficients)
    check(lambda x, c, out: aten._compute_linear_combination(x, c, out=out), X, coefficients, torch.zeros(3, 3, 4))


@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_product(by_row: bool) -> None:
    from torch.nn.functional import ScalingType, scaled_mm

    torch.manual_seed(0)
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn)
    recipe = ScalingType.RowWise if by_row else ScalingType.TensorWise
    scales = (torch.rand(16, 1), torch.rand(1, 16)) if by_row else (torch.tensor(0.5), torch.tensor(2.0))

    def product(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return scaled_mm(a, b.t(), s, recipe, t, recipe, output_dtype=torch.bfloat16)

    check(product, a, b, *scales)


def test_add_relu() -> None:
    x, y = X, -X.flip(0)
    check(lambda x, y: torch._VF._add_relu(x, y, alpha=3), x, y)
    check(lambda x, y: torch._VF._add_relu_(x, y, alpha=3), x.clone(), y)
    check(lambda x: aten._add_relu.Scalar(x, 1.5), x)
    check(lambda x, y, out: aten._add_relu.out(x, y, alpha=2, out=out), x, y, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool])
def test_hash(dtype: torch.dtype) -> None:
    x = (X * 7).abs().to(dtype)
    check(torch.hash_tensor, x)
    check(lambda x: torch.hash_tensor(x, 1, keepdim=True), x)
    check(lambda x: torch.hash_tensor(x, (0, 2)), x)


def test_extremes() -> None:
    check(torch._aminmax, X)
    check(lambda x: torch._aminmax(x, 1, True), X)


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_running_extremes_into_given_memory(function: object) -> None:
    out = (torch.zeros_like(X), torch.zeros(X.shape, dtype=torch.int64))
    check(lambda x, *out: function(x, 1, out=out), X, *out)
