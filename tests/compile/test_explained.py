"""The report explains recompiles and graph breaks; storage offsets and changing numbers cause none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.compile.programs import compiled
from torch_tpu import metrics


def programs_for(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any) -> tuple[int, int]:
    """How many graphs calls need, and how many programs; each result is compared with that of the plain function."""
    run = compiled(function, **options)
    for args in calls:
        torch.testing.assert_close(run(*args).cpu(), function(*args).cpu())
    graphs = [graph for graph in metrics.snapshot()["graphs"] if graph["programs"]]
    return len(graphs), sum(len(graph["programs"]) for graph in graphs)


def test_a_graph_break_is_told_with_its_line() -> None:
    def speaks(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("between")
        return y * 2

    torch.compiler.reset()
    torch.compile(speaks)(torch.ones(3, device="tpu"))
    (told,) = metrics.snapshot()["graph_breaks"]
    assert (told["source"].startswith('print("between")'), told["count"]) == (True, 1)
    assert told["line"].rpartition(":")[0] == __file__
    assert "`print`" in told["detail"]
    assert told["line"] in metrics.report(10**6)


def test_a_recompile_is_told_with_its_reason() -> None:
    torch.compiler.reset()
    run = torch.compile(lambda x: x + 1, dynamic=False)
    for size in (3, 4):
        run(torch.ones(size, device="tpu"))
    reasons = [graph["reason"] for graph in metrics.snapshot()["graphs"]]
    assert "size mismatch at index 0. expected 3, actual 4" in reasons[-1]
    assert reasons[-1] in metrics.report(10**6)


@pytest.mark.parametrize("is_written", [False, True])
def test_storage_offsets(is_written: bool) -> None:
    base = torch.arange(40.0, device="tpu")

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1 if is_written else x * 2 + 1

    run = compiled(double)
    for start in range(6):
        want = base[start : start + 8] * 2 + 1
        torch.testing.assert_close(run(base[start : start + 8]).cpu(), want.cpu())
    (graph,) = [graph for graph in metrics.snapshot()["graphs"] if graph["programs"]]
    assert len(graph["programs"]) == 2  # one for views that start where their storage does, one for all others


@pytest.mark.parametrize("dynamic", [None, True])
def test_floats(dynamic: bool | None) -> None:
    x = torch.arange(4.0, device="tpu")
    graphs, made = programs_for(lambda x, s: x * s + s, [(x, 0.1 * n) for n in range(1, 7)], dynamic=dynamic)
    # Dynamo takes a number to be constant until it has had two values.
    assert graphs == made == (1 if dynamic else 2)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [lambda x, n: x * n - n, lambda x, n: torch.add(x, x, alpha=n), lambda x, n: (x.long() // n) & n],
    ids=["operand", "alpha", "int64"],
)
def test_integers(function: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    x = torch.arange(4.0, device="tpu")
    graphs, made = programs_for(function, [(x, n) for n in (2, 3, 5, 2**40, -7)], dynamic=dynamic)
    assert graphs == made <= (1 if dynamic else 2)


def test_integers_that_are_sizes_too() -> None:
    x = torch.arange(4.0, device="tpu")
    graphs, made = programs_for(lambda x, n: (x * n).expand(n, 4) + n, [(x, n) for n in (2, 3, 5)], dynamic=True)
    assert (graphs, made) == (1, 3)
