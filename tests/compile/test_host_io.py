"""Graphs with tensors on the host: one program, results where eager has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._pytree import tree_leaves

from torch_tpu import metrics
from torch_tpu.compile.program.host_io import Border


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compare(function: Callable[..., object], *hosts: torch.Tensor, programs: bool = True) -> None:
    """The compiled function equals the function, for a device tensor and host tensors, which it may write."""
    x = torch.arange(6.0, device="tpu").reshape(2, 3)
    copies = [h.clone() for h in hosts]
    by_operator = metrics.counters().get("graph_by_operator", 0)
    torch.manual_seed(0)
    got = torch.compile(function, fullgraph=True)(x, *copies)
    assert (metrics.counters().get("graph_by_operator", 0) == by_operator) == programs
    torch.manual_seed(0)
    want = function(x, *hosts)
    for g, w in zip(tree_leaves((got, copies)), tree_leaves((want, list(hosts))), strict=True):
        assert g.device == w.device
        torch.testing.assert_close(g.cpu(), w.cpu())


ROW = torch.tensor([1.0, 2.0, 4.0])
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "argument": (lambda x, row: x + row.to("tpu"), (ROW,)),
    "index": (lambda x, i: x[:, i], (torch.tensor([2, 0]),)),
    "number": (lambda x, c: (x * c, c + 1), (torch.tensor(2.0),)),
    "made inside": (lambda x: x + torch.arange(3).to("tpu"), ()),
    "literal": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to(x.device), ()),
    "result": (lambda x: (x.sum().cpu(), x * 2, (x + 1).cpu() * 2), ()),
    "side by side": (lambda x, row: (x + 1, row + 1), (ROW,)),
    "returned": (lambda x, row: (x + 1, row, row[1:]), (ROW,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program(name: str) -> None:
    function, hosts = FUNCTIONS[name]
    _compare(function, *hosts)


def test_what_the_host_alone_can_do_runs_by_operator() -> None:
    _compare(lambda x, row: (row.add_(1), x + 1)[1], ROW.clone(), programs=False)
    _compare(lambda x: x + torch.rand(3).to("tpu"), programs=False)


def test_gradients_go_where_the_arguments_are() -> None:
    x = torch.arange(6.0, device="tpu").reshape(2, 3)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return ((weight.to("tpu") * x).square().sum(0).cpu() * torch.arange(3)).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        weight = ROW.clone().requires_grad_()
        value = function(weight)
        value.backward()
        results.append((value.detach(), weight.grad))
    torch.testing.assert_close(results[1], results[0])
    assert results[1][0].device.type == results[1][1].device.type == "cpu"


def test_functions_of_the_host_alone_are_left_as_they_are() -> None:
    before = metrics.counters().get("execute", 0)
    assert torch.compile(lambda row: row + 1, backend="tpu")(ROW).tolist() == [2.0, 3.0, 5.0]
    assert metrics.counters().get("execute", 0) == before


def test_where_host_tensors_enter_and_leave() -> None:
    def example(x: torch.Tensor, row: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + row, row, number * 2

    graph = torch.fx.symbolic_trace(example)
    x, row, number, total, product, _ = graph.graph.nodes
    for node, device, shape in [(x, "tpu", (3,)), (row, "cpu", (3,)), (number, "cpu", ()), (total, "tpu", (3,))]:
        node.meta["val"] = torch.empty(shape, device=device)
    product.meta["val"] = torch.empty(())
    border = Border(graph)
    assert border
    assert not border.refused
    values = [torch.ones(3, device="tpu"), ROW, torch.tensor(5.0)]
    assert [t.device.type for t in border.enter(values)] == ["tpu", "tpu", "cpu"]
    results = [torch.ones((), device="tpu") for _ in range(3)]
    left = border.leave(list(results), values)
    assert left[0] is results[0]
    assert left[1] is ROW
    assert left[2].device.type == "cpu"
