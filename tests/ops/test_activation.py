"""Activation functions, softmax and their derivatives against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo, no_fallback
from torch_tpu import metrics

FUNCTIONS = [
    "threshold",
    "relu6",
    "leaky_relu",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "hardshrink",
    "softshrink",
    "prelu",
    "elu",
    "celu",
    "selu",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "logsigmoid",
    "glu",
    "softsign",
    "tanhshrink",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", (torch.float32,), samples=8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_in_half_precision(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", (torch.bfloat16,), samples=3)


@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "softplus", "logsigmoid", "mish"])
def test_function_in_double_precision(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", (torch.float64,), samples=3)


@pytest.mark.parametrize("name", ["threshold", "relu6", "hardtanh"])
def test_function_of_integers(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", (torch.int64, torch.uint8), samples=3)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "nn.functional.softmin"])
def test_softmax(name: str) -> None:
    check_opinfo(name, (torch.float32, torch.float64))
    # The CPU rounds the logarithm of a row's sum to bfloat16 (step 1/32 at 4 to 8) before it subtracts it.
    check_opinfo(name, (torch.bfloat16,), samples=4, rtol=1.6e-2, atol=2e-2)
    check_opinfo(name, (torch.float32,), variant="with_dtype", samples=3)


@pytest.mark.parametrize("derivative", [torch._softmax_backward_data, torch._log_softmax_backward_data])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1])
def test_derivatives_of_softmax_round_once(derivative, dtype: torch.dtype, dim: int) -> None:
    """As the CPU's kernels do: the same bits."""
    y = torch.log_softmax(torch.randn(9, 33), dim)
    y = (y.exp() if derivative is torch._softmax_backward_data else y).to(dtype)
    check(derivative, torch.randn(9, 33).to(dtype), y, dim, dtype, rtol=torch.finfo(dtype).eps, atol=1e-7)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, 20.0, 21.0, -100.0, 1e4, float("inf"), -float("inf")]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.gelu(x, approximate="tanh"),
        F.hardsigmoid,
        F.hardswish,
        F.hardshrink,
        F.softshrink,
        F.hardtanh,
        F.leaky_relu,
        F.logsigmoid,
        F.softplus,
        F.elu,
        F.silu,
        F.mish,
        lambda x: F.threshold(x, 0.5, 20),
        lambda x: torch.special.logit(x),
        lambda x: torch.special.logit(x, eps=0.25),
        lambda x: torch.sigmoid(x),
        lambda x: F.rrelu(x, 0.25, 0.5),
        lambda x: F.celu(x, 0.5),
        lambda x: F.prelu(x, torch.full((1,), 0.3, device=x.device)),
    ],
)
def test_kinks_and_extremes(function) -> None:
    """One by one: the CPU's vectorised kernels disagree with its scalar ones at NaN and infinity."""
    check(
        lambda *xs: [function(x) for x in xs],
        *(torch.tensor([v], requires_grad=True) for v in (*SPECIAL, float("nan"))),
    )


def test_gelu_at_extremes() -> None:
    """Many at once: at infinity the CPU's vectorised kernel gives NaN on some processors, and the device follows it."""
    check(F.gelu, torch.tensor([*SPECIAL, float("nan")]).repeat(8), strides=False)


IN_PLACE = [F.elu, F.leaky_relu, F.hardtanh, F.hardswish, F.silu, F.mish, F.relu6, F.hardsigmoid, F.celu, F.selu]


def test_in_place_forms() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            f(x.clone(), inplace=True)
            for f in (
                F.elu,
                F.leaky_relu,
                F.hardtanh,
                F.hardswish,
                F.silu,
                F.mish,
                F.relu6,
                F.hardsigmoid,
                F.celu,
                F.selu,
            )
        ]

    check(run, torch.randn(4, 5))


def test_gradient_from_the_result_of_an_in_place_form() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.leaky_relu(x * 1, 0.1, inplace=True), F.elu(x * 1, 0.5, inplace=True)]

    check(run, torch.randn(20, requires_grad=True))


def test_changing_slope_does_not_recompile() -> None:
    x = torch.tensor([-1.0, 2.0], device="tpu")
    F.leaky_relu(x, 0.5)
    before = metrics.counters().get("program", 0)
    assert [F.leaky_relu(x, s)[0].item() for s in (0.25, 0.125, 3.0)] == [-0.25, -0.125, -3.0]
    assert metrics.counters().get("program", 0) == before


def test_second_derivatives() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for f in (F.gelu, F.silu, F.softplus, torch.sigmoid, torch.tanh, F.elu, F.logsigmoid, F.glu, F.mish):
            (first,) = torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
        return found

    check(run, torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_of_extremes(function) -> None:
    inf = float("inf")
    rows = [
        [0.0, 1.0, -1.0],
        [-inf, 0.0, 1.0],
        [-inf, -inf, -inf],
        [inf, 0.0, 0.0],
        [float("nan"), 0, 0],
        [1e4, 1e4, 0],
    ]
    check(function, torch.tensor(rows, requires_grad=True), 1)
    check(function, torch.tensor(rows, requires_grad=True), 0)
    check(function, torch.tensor(2.0, requires_grad=True), 0)
    check(function, torch.ones(0, 3), 0)
    check(function, torch.ones(3, 0), 1)
    check(function, torch.randn(2, 3, 4).transpose(0, 2), 1)


def test_softmax_half_to_float() -> None:
    check(
        lambda x: torch.softmax(x, 1, dtype=torch.float32), torch.randn(4, 5, dtype=torch.bfloat16, requires_grad=True)
    )
    check(
        lambda x: torch.log_softmax(x, 1, dtype=torch.float32),
        torch.randn(4, 5, dtype=torch.float16, requires_grad=True),
    )


@pytest.mark.parametrize(("kind", "mask_shape"), [(0, (5, 5)), (1, (2, 5)), (2, (2, 3, 5, 5))])
def test_masked_softmax(kind: int, mask_shape: tuple[int, ...]) -> None:
    mask = torch.rand(mask_shape) < 0.4
    mask.view(-1, 5)[0] = True  # a row without any position left
    check(lambda x, m: torch._masked_softmax(x, m, 3, kind), torch.randn(2, 3, 5, 5), mask)


def test_masked_softmax_gradient() -> None:
    mask = torch.rand(2, 3, 5) < 0.4
    mask[..., 0] = False
    check(lambda x, m: torch._masked_softmax(x, m, 2), torch.randn(2, 3, 5, requires_grad=True), mask)


def test_rrelu_in_place() -> None:
    check(lambda x: F.rrelu_(x * 1, 0.25, 0.5), torch.randn(5, requires_grad=True))
    x = torch.full((1000,), -1.0, device="tpu")
    with no_fallback():
        assert F.rrelu_(x, 0.25, 0.5, training=True) is x
    assert -0.5 <= x.min().item() < -0.45 < -0.3 < x.max().item() <= -0.25
