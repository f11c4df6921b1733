"""Graphs with something that no program can express: programs around it, equal to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compile.programs import by_operator, check_compiled, compiled, plans_of
from torch_tpu import metrics
from torch_tpu.compile.program.graph_cut import Cut

X, Y = (torch.randn(3, 3, generator=torch.Generator().manual_seed(i)) for i in range(2))


@torch.library.custom_op("torch_tpu_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """NumPy computes it, so nothing can be traced."""
    return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: twice(grad))


@torch.library.custom_op("torch_tpu_tests::count_", mutates_args=("counter",))
def count_(counter: Tensor, x: Tensor) -> None:
    counter.add_(int((x.cpu().numpy() > 0).sum()))


def sandwich(x: Tensor, y: Tensor) -> Tensor:
    a = torch.sin(x) @ y
    return torch.cos(twice(a)) @ y + a.sum()


def cuts() -> float:
    return metrics.counters().get("graph_cut", 0)


def equals_cpu(function: Callable[..., Any], *args: Tensor) -> None:
    want = function(*(a.clone() for a in args))
    torch.testing.assert_close(compiled(function)(*(a.to("tpu") for a in args)).cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _captures_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def test_a_custom_operator_runs_between_two_programs() -> None:
    before = metrics.counters().get("graph_by_operator", 0), cuts()
    made = plans_of(lambda: equals_cpu(sandwich, X, Y))
    # Forward ran once: what lies before the operator, and what lies after it.
    assert len(made) == 2
    assert (metrics.counters().get("graph_by_operator", 0), cuts()) == (before[0], before[1] + 1)


def test_gradients_through_a_custom_operator() -> None:
    host, device = ([t.detach().clone().to(d).requires_grad_() for t in (X, Y)] for d in ("cpu", "tpu"))
    sandwich(*host).sum().backward()
    before = cuts()
    compiled(sandwich)(*device).sum().backward()
    assert cuts() == before + 2
    torch.testing.assert_close([t.grad.cpu() for t in device], [t.grad for t in host], rtol=1e-4, atol=1e-5)


def test_a_custom_operator_that_writes() -> None:
    def function(x: Tensor, counter: Tensor) -> Tensor:
        y = torch.sin(x)
        count_(counter, y)
        return y * counter

    counter = torch.zeros((), dtype=torch.int64, device="tpu")
    got = compiled(function)(X.to("tpu"), counter)
    count = int((X.sin() > 0).sum())
    assert counter.item() == count
    torch.testing.assert_close(got.cpu(), X.sin() * count, rtol=1e-4, atol=1e-5)


def test_sizes_that_data_decides() -> None:
    """`nonzero` and `zeros(n)` run between programs that are made for the sizes met."""

    def function(x: Tensor) -> Tensor:
        places = torch.nonzero(x + 0)
        n = places.sum().item()
        return torch.cat([torch.zeros(n, device=x.device) + 1, (places * 2).flatten().sin()]) * x.sum()

    for x in (X.sign().relu(), -X.sign().relu(), torch.ones(3, 3)):
        equals_cpu(function, x)


def test_results_that_are_views_of_arguments_stay_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return twice(x + 1) + 1, x[1:]

    x = X.to("tpu")
    part = compiled(function)(x)[1]
    part += 10
    torch.testing.assert_close(x.cpu()[1:], X[1:] + 10)


def test_the_pieces_of_a_graph() -> None:
    """The graph before and after the cut at its only `mul`; a tuple's parts stay with what makes it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.aminmax.default, (x,))
    low, high = (graph.call_function(__import__("operator").getitem, (both, i)) for i in range(2))
    middle = graph.call_function(torch.ops.aten.mul.Tensor, (low, high))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (middle, high)), x))
    pieces: list[torch.fx.GraphModule] = []

    def compile_piece(piece: torch.fx.GraphModule, is_first: bool) -> Callable[..., Any]:
        pieces.append(piece)
        return piece

    cut = Cut(torch.fx.GraphModule(nn.Module(), graph), middle, compile_piece)
    targets = [[n.name for n in piece.graph.nodes] for piece in pieces]
    assert targets == [
        ["x", "aminmax_default", "getitem", "getitem_1", "output"],
        ["mul_tensor", "getitem_1", "add_tensor", "output"],
    ]
    given = torch.tensor([2.0, 5.0])
    assert cut(given)[0].item() == 15.0
    assert cut(given)[1] is given


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 30 * ctx.saved_tensors[0] ** 2


def test_custom_autograd_functions_are_part_of_the_program() -> None:
    before = by_operator()
    check_compiled(lambda x, y: Cube.apply(torch.sin(x)) @ y, X, Y)
    assert by_operator() == before
