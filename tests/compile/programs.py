"""Checks that a compiled function is one program for forward and one for backward, and equals the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.plan import Plan


def by_operator() -> float:
    """How many graphs ran so far operator by operator, or in pieces: not as one program."""
    counters = metrics.counters()
    return counters.get("graph_by_operator", 0) + counters.get("graph_cut", 0)


def plans_of(function: Callable[[], Any]) -> list[Plan]:
    """The programs of graphs that a call makes."""
    known = set(plan_table.plans)
    function()
    new = [plan for key, plan in plan_table.plans.items() if key not in known]
    return [p for p in new if isinstance(p, Plan) and p.name == "graph"]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="tpu", **options)


def check_compiled(
    function: Callable[..., Any],
    *args: Any,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Compares a function compiled for the device with the same one on the CPU, results and gradients.

    Args:
        args: CPU tensors, all floating point ones of which get a gradient, and other arguments.
        reference: what to compare with instead.
    """
    host = [_leaf(a, "cpu", gradients) for a in args]
    device = [_leaf(a, "tpu", gradients) for a in args]
    before = by_operator()
    want, got = _flat((reference or function)(*host)), _flat(compiled(function)(*device))
    assert [isinstance(w, torch.Tensor) for w in want] == [isinstance(g, torch.Tensor) for g in got]
    torch.testing.assert_close([_cpu(g) for g in got], want, rtol=rtol, atol=atol)
    if gradients:
        for results, where in ((want, "cpu"), (got, "tpu")):
            torch.manual_seed(0)
            differentiable = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            torch.autograd.backward(
                differentiable, [torch.randn(r.shape).to(r.dtype).to(where) for r in differentiable]
            )
        for i, (a, b) in enumerate(zip(host, device, strict=True)):
            if isinstance(a, torch.Tensor) and a.grad is not None:
                assert b.grad is not None, f"argument {i} has no gradient"
                torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=rtol, atol=atol, msg=lambda m, i=i: f"{i}: {m}")
    assert by_operator() == before


def _leaf(value: Any, device: str, gradients: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.detach().clone().to(device)
    return moved.requires_grad_() if gradients and value.is_floating_point() else moved


def _cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _flat(results: Any) -> Sequence[Any]:
    return torch.utils._pytree.tree_leaves(results)
