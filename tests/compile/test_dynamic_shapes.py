"""Dynamic shapes: Dynamo captures a graph once; programs are found by shape and made without capturing again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_tpu import metrics


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counted(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("tpu")(graph, examples)

    return torch.compile(function, backend=backend, fullgraph=True, **options), graphs


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.t(), -1).sum(0) * x.shape[0]


def marked(mark: Callable[[torch.Tensor, int], None], size: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 3 * size).view(size, 3).to("tpu")
    mark(x, 0)
    return x


@pytest.mark.parametrize(
    ("mark", "dynamic", "captures"),
    [
        (lambda x, d: None, None, 2),  # the first shape by itself, then any
        (lambda x, d: None, True, 1),
        (torch._dynamo.mark_dynamic, None, 1),
        (torch._dynamo.decorators.mark_unbacked, None, 1),
    ],
    ids=["automatic", "dynamic=True", "mark_dynamic", "mark_unbacked"],
)
def test_one_capture_and_a_program_for_each_shape(
    mark: Callable[[torch.Tensor, int], None], dynamic: bool | None, captures: int
) -> None:
    function, graphs = counted(scores, dynamic=dynamic)
    for size in (4, 6, 5):
        x = marked(mark, size)
        torch.testing.assert_close(function(x).cpu(), scores(x.cpu()))
    assert len(graphs) == captures
    before = metrics.counters().get("program", 0)
    for size in (5, 6, 5):
        x = marked(mark, size)
        torch.testing.assert_close(function(x).cpu(), scores(x.cpu()))
    assert len(graphs) == captures
    assert metrics.counters().get("program", 0) == before


def test_backward_has_its_programs_too() -> None:
    function, graphs = counted(lambda x: scores(x).square().sum(), dynamic=True)
    for size in (4, 6, 4):
        host = torch.linspace(-1, 1, 3 * size).view(size, 3).requires_grad_()
        device = host.detach().to("tpu").requires_grad_()
        scores(host).square().sum().backward()
        function(device).backward()
        torch.testing.assert_close(device.grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def test_the_report_advises_buckets_where_shapes_are_many() -> None:
    advice = "its sizes vary: options={'buckets': True}"
    function = torch.compile(lambda x: x * 2, backend="tpu", dynamic=True)
    for size in range(2, 10):
        assert advice not in metrics.report(10**6)
        function(torch.ones(size, 3, device="tpu"))
    assert advice in metrics.report(10**6)
