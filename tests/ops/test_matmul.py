"""Matrix products against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_tpu
from tools.compare import assert_same, check, check_opinfo, no_fallback

EXACT = (torch.float32, torch.int64, torch.complex64)
# The order of a sum is not the CPU's.
SUMS = {"rtol": 1e-5, "atol": 1e-4}
# The CPU rounds to bfloat16 in the middle of addbmm, addr and chains of products, the device once at the end.
ROUNDED = {"rtol": 2e-2, "atol": 5e-2}


@pytest.mark.parametrize("name", ["mm", "bmm", "mv", "matmul", "addmm", "addmv", "addbmm", "baddbmm", "__rmatmul__"])
def test_products(name: str) -> None:
    check_opinfo(name, EXACT, samples=4, **SUMS)
    if name != "addbmm":
        check_opinfo(name, (torch.bfloat16,), samples=2, **ROUNDED)
    check_opinfo(name, (torch.uint8, torch.float64), samples=2)


def test_addbmm_in_bfloat16_rounds_once() -> None:
    """The CPU rounds after every batch, which leaves it far from the sum."""
    bias, a, b = torch.randn(3, 4).bfloat16(), torch.randn(9, 3, 5).bfloat16(), torch.randn(9, 5, 4).bfloat16()
    with no_fallback():
        got = torch.addbmm(bias.to("tpu"), a.to("tpu"), b.to("tpu"), beta=0.6, alpha=0.2)
    assert_same(got, torch.addbmm(bias.float(), a.float(), b.float(), beta=0.6, alpha=0.2).bfloat16())


@pytest.mark.parametrize("name", ["dot", "vdot", "outer", "linalg.vecdot", "linalg.multi_dot", "inner", "tensordot"])
def test_vector_products(name: str) -> None:
    check_opinfo(name, EXACT, samples=4, **SUMS)
    check_opinfo(name, (torch.bfloat16,), samples=2, **ROUNDED)


def test_addr_with_bool() -> None:
    check_opinfo("addr", (*EXACT, torch.bool, torch.uint8), samples=6)
    check_opinfo("addr", (torch.bfloat16,), samples=4, **ROUNDED)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap(dtype: torch.dtype) -> None:
    a = torch.randint(-100, 200, (5, 7)).to(dtype)
    check(lambda x: (x @ x.T, torch.addmm(x[:, :5], x, x.T, beta=3, alpha=-2), x @ x[0], x[0].dot(x[1])), a)


def test_bool_is_refused_as_on_the_cpu() -> None:
    a = torch.ones(2, 2, dtype=torch.bool, device="tpu")
    for product in (torch.mm, torch.mv, torch.dot):
        with pytest.raises(NotImplementedError, match="Bool"):
            product(a if product is not torch.dot else a[0], a if product is torch.mm else a[0])


def test_dtypes_must_agree() -> None:
    a = torch.ones(2, 2, device="tpu")
    for product in (torch.mm, torch.matmul):
        with pytest.raises(RuntimeError, match="dtype"):
            product(a, a.double())


@pytest.mark.parametrize("alpha", [1, 2, -0.25])
@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_alpha_and_beta(alpha: float, beta: float) -> None:
    bias, a, b = torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3)
    check(torch.addmm, bias, a, b, beta=beta, alpha=alpha)
    check(torch.addmv, bias[:, 0], a, b[:, 0], beta=beta, alpha=alpha)
    check(torch.addr, bias, a[:, 0], b[0], beta=beta, alpha=alpha)
    check(torch.addbmm, bias, a[None], b[None], beta=beta, alpha=alpha)
    check(torch.baddbmm, bias[None], a[None], b[None], beta=beta, alpha=alpha)
    check(lambda x, y, z: x.addmm_(y, z, beta=beta, alpha=alpha), bias, a, b)


def test_beta_of_zero_ignores_nan() -> None:
    bias, a, b = torch.full((2, 3), float("nan")), torch.randn(2, 4), torch.randn(4, 3)
    check(torch.addmm, bias, a, b, beta=0)
    check(torch.addmm, bias[0], a, b, beta=0.0)
    check(torch.addmv, bias[:, 0], a, b[:, 0], beta=0)
    check(torch.addr, bias, a[:, 0], b[0], beta=0)
    check(torch.addbmm, bias, a[None], b[None], beta=0)
    check(torch.baddbmm, bias, a[None], b[None], beta=0)


def test_empty_contraction_is_the_scaled_bias() -> None:
    bias, a, b = torch.randn(2, 3), torch.zeros(2, 0), torch.zeros(0, 3)
    check(torch.addmm, bias, a, b, beta=0.5)
    check(torch.mm, a, b)
    check(torch.bmm, torch.zeros(0, 2, 3), torch.zeros(0, 3, 2))


def test_out_and_transposed_operands() -> None:
    a, b = torch.randn(4, 6).t(), torch.randn(5, 4).t()

    def into(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y, out=out)

    check(into, a, b, torch.empty(5, 6).t())
    check(torch.mm, a.conj(), b.to(a.dtype))
    c = torch.randn(3, 3, dtype=torch.complex64)
    check(lambda x: (x.conj() @ x, x.mH @ x, torch.vdot(x[0], x[1])), c)


def test_a_changed_alpha_needs_no_new_program() -> None:
    from torch_tpu import metrics

    a = torch.randn(3, 3, device="tpu")
    torch.addmm(a, a, a, alpha=0.5)
    before = metrics.counters().get("program", 0)
    want = torch.addmm(a.cpu(), a.cpu(), a.cpu(), alpha=0.7)
    assert_same(torch.addmm(a, a, a, alpha=0.7), want)
    assert metrics.counters().get("program", 0) == before


def test_float32_accuracy() -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    exact = a.double() @ b.double().T
    x, y = a.to("tpu"), b.to("tpu")
    for product in (
        x @ y.T,
        torch.einsum("ik,jk->ij", x, y),
        torch.nn.functional.linear(x, y),
        torch.bmm(x[None], y.T[None])[0],
    ):
        assert (product.cpu().double() - exact).abs().max() < 2e-5


@pytest.mark.parametrize(("precision", "wanted"), [("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT")])
def test_precision_setting(precision: str, wanted: str) -> None:
    """A product with the setting is another program than one without it, in one process too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        (program,) = torch_tpu.compile.debug(torch.mm, *torch.ones(2, 3, 3, device="tpu")).programs
        assert f"precision = [{wanted}, {wanted}]" in program.stablehlo
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("use_gelu", [False, True])
def test_addmm_activation(use_gelu: bool) -> None:
    bias, a, b = torch.randn(3), torch.randn(2, 4), torch.randn(4, 3)
    # The CPU's epilogue is the exact gelu, the device's that of CUDA: its tanh form.
    check(torch._addmm_activation, bias, a, b, use_gelu=use_gelu, atol=1e-3, rtol=1e-3)


def test_wider_results() -> None:
    a = torch.randn(3, 4).bfloat16()
    with no_fallback():
        got = torch.mm(a.to("tpu"), a.T.to("tpu"), out_dtype=torch.float32)
        batched = torch.bmm(a[None].to("tpu"), a.T[None].to("tpu"), out_dtype=torch.float32)
    assert_same(got, a.float() @ a.float().T)
    assert_same(batched[0], a.float() @ a.float().T)
    check(
        torch._int_mm, torch.randint(-128, 127, (3, 9)).to(torch.int8), torch.randint(-128, 127, (9, 4)).to(torch.int8)
    )


def test_int8_weights() -> None:
    weight = torch.randint(-128, 127, (16, 32)).to(torch.int8)
    x, scales = torch.randn(4, 32).bfloat16(), torch.rand(16).bfloat16()
    check(torch._weight_int8pack_mm, x, weight, scales)


@pytest.mark.parametrize("row_wise", [False, True])
def test_scaled_mm(row_wise: bool) -> None:
    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    scales = (torch.rand(16, 1), torch.rand(1, 16)) if row_wise else (torch.tensor(2.0), torch.tensor(0.5))
    check(torch._scaled_mm, a, b.T, *scales, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [[3, 200, 200, 264], [264, 264, 264, 264], [0, 0, 128, 264]])
def test_grouped_mm(dtype: torch.dtype, ends: list[int]) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    tolerance = {"rtol": 2e-2, "atol": 1e-1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    rows, columns = torch.randn(264, 16, dtype=dtype), torch.randn(16, 264, dtype=dtype)
    matrices = torch.randn(4, 16, 8, dtype=dtype)
    check(
        lambda a, b, o: torch._grouped_mm(a, b, offs=o),
        rows.requires_grad_(),
        matrices.requires_grad_(),
        offs,
        **tolerance,
    )
    check(
        lambda a, b, o: torch._grouped_mm(a, b, offs=o), torch.randn(4, 8, 16, dtype=dtype), columns, offs, **tolerance
    )
    check(lambda a, b, o: torch._grouped_mm(a, b, offs=o), columns, torch.randn(264, 8, dtype=dtype), offs, **tolerance)
    check(torch._grouped_mm, torch.randn(4, 8, 16, dtype=dtype), matrices.detach(), **tolerance)


def test_empty_bools() -> None:
    """The CPU multiplies matrices of bools where there is nothing to multiply."""

    def run(none: torch.Tensor, some: torch.Tensor) -> Any:
        products = none @ none.t(), none.t() @ none, none @ some, torch.bmm(none[None], none.t()[None])
        return products, torch.nn.functional.linear(none, some.expand(2, 3), some[:2])

    check(run, torch.zeros(0, 3, dtype=torch.bool), torch.ones(3, dtype=torch.bool))


def test_bfloat16_batch_of_one() -> None:
    """XLA:CPU refused to run the second product."""
    a, b, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((8, 2), (8, 3), (4, 2, 3)))
    check(lambda a, b: torch.bmm(a.T[None], b[None]), a, b)
    check(torch.nn.functional.bilinear, a, b, weight, rtol=2e-2, atol=5e-2)


def test_distances_of_no_batch() -> None:
    for p in (1.0, 2.0, 3.0):
        check(
            lambda x, y, p=p: torch.cdist(x, y, p=p),
            torch.randn(0, 4, 5, requires_grad=True),
            torch.randn(3, 5, requires_grad=True),
        )


def test_the_gradient_of_a_weight_of_many_rows():
    """A transposed left operand of 128 rows or more, which XLA:CPU gets in memory of its own."""
    grad, x = torch.randn(3, 4, 150), torch.randn(3, 4, 20)
    check(lambda grad, x: grad.flatten(0, 1).T @ x.flatten(0, 1), grad, x)
    check(torch.nn.functional.linear, x, torch.randn(150, 20), torch.randn(150))


@pytest.mark.parametrize("mode", [torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE])
def test_bfloat16_products_of_what_was_computed_from_a_transpose(mode: torch.tpu.EagerMode) -> None:
    """XLA:CPU moves the transpose behind the selection and into the product, which it can then no longer run."""
    a, b = torch.randn(16, 61).bfloat16(), torch.randn(16, 32).bfloat16()

    def product(a: torch.Tensor, b: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(16, device=a.device) < length
        zero = torch.zeros((), dtype=a.dtype, device=a.device)
        return torch.where(counts[None], a.t(), zero) @ torch.where(counts[:, None], b, zero)

    with torch.tpu.set_eager_mode(mode):
        check(product, a, b, torch.tensor(7), rtol=1e-2, atol=1e-2)
