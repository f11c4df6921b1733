"""Compiled training: whole steps, what users write themselves, and functions of other devices."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import metrics


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _network() -> nn.Module:
    torch.manual_seed(1)
    # No batch normalisation: the gradient of a bias before it is nothing but rounding, which Adam makes large.
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_whole_step_is_captured(kind: str) -> None:
    """Forward, backward and update in one compiled function, where Dynamo breaks at `backward` alone."""
    x, y = torch.randn(4, 8, device="tpu"), torch.tensor([0, 2, 1, 1], device="tpu")
    results, ran = [], []
    for compile_it in (False, True):
        model = _network().to("tpu")
        optimizer = OPTIMIZERS[kind](model.parameters())

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        function = torch.compile(step) if compile_it else step
        losses = [function() for _ in range(3)]
        before = metrics.counters().get("execute", 0), metrics.counters().get("program", 0)
        losses.append(function())
        ran.append(metrics.counters().get("execute", 0) - before[0])
        assert metrics.counters().get("program", 0) == before[1]
        results.append([t.detach().cpu() for t in (*losses, *model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert ran[1] < ran[0]


def test_a_step_without_autograd_is_one_program() -> None:
    """Gradients by `torch.func` and an update in place: one graph, one program, no break."""
    model = _network().to("tpu")
    x, y = torch.randn(4, 8, device="tpu"), torch.tensor([0, 2, 1, 1], device="tpu")
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    def step(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients, loss = torch.func.grad_and_value(loss_of)(parameters)
        for name, gradient in gradients.items():
            parameters[name].sub_(0.1 * gradient)
        return loss

    want = copy.deepcopy(parameters)
    want_losses = [step(want).item() for _ in range(3)]
    function = torch.compile(step, fullgraph=True)
    losses = [function(parameters)]
    before = metrics.counters().get("execute", 0)
    losses += [function(parameters), function(parameters)]
    assert metrics.counters().get("execute", 0) == before + 2
    torch.testing.assert_close([loss.item() for loss in losses], want_losses)
    torch.testing.assert_close(parameters, want)
    assert losses[2] < losses[0]


class _Clipped(torch.autograd.Function):
    """The identity, whose gradient is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-ctx.limit, ctx.limit) * x.sign(), None


def test_an_autograd_function_keeps_its_gradient() -> None:
    function = torch.compile(lambda x: (_Clipped.apply(x * 2, 0.5) * 3).sum(), fullgraph=True)
    x = torch.tensor([1.0, -2.0], device="tpu", requires_grad=True)
    value = function(x)
    value.backward()
    assert value.item() == -6.0
    assert x.grad.tolist() == [1.0, -1.0]


def test_an_operator_of_the_user_gets_real_tensors() -> None:
    @torch.library.custom_op("torch_tpu_test::doubled_by_hand", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([2 * value for value in x.tolist()], device=x.device)

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: gradient * 2)
    x = torch.tensor([1.0, 3.0], device="tpu", requires_grad=True)
    value = torch.compile(lambda x: doubled(x + 1) * 5, fullgraph=True)(x)
    assert value.tolist() == [20.0, 40.0]
    value.sum().backward()
    assert x.grad.tolist() == [10.0, 10.0]


def test_a_model_on_the_host_compiles_as_without_the_device() -> None:
    """What reaches Inductor is the graph Dynamo captured, with the arguments it was captured with."""
    from torch._inductor import compile_fx

    replaced = compile_fx.compile_fx
    (original,) = (c.cell_contents for c in replaced.__closure__ if callable(c.cell_contents))
    assert original.__module__ == "torch._inductor.compile_fx"
    assert original.__name__ == "compile_fx"
    before = {k: v for k, v in metrics.counters().items() if k in ("program", "execute")}
    seen = []

    def inductor(graph: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((graph, examples, args, kwargs))
        return graph.forward

    cell = next(c for c in replaced.__closure__ if c.cell_contents is original)
    cell.cell_contents = inductor
    try:
        model, x = _network(), torch.randn(2, 8)
        result = torch.compile(model, options={"max_autotune": True})(x)
        graph, examples, args, kwargs = seen[0]
        assert replaced(graph, examples, *args, **kwargs) == graph.forward
    finally:
        cell.cell_contents = original
    torch.testing.assert_close(result, model(x))
    assert seen[0][0] is seen[1][0]
    assert seen[0][2:] == seen[1][2:]
    assert kwargs["config_patches"] == {"max_autotune": True}
    assert {k: v for k, v in metrics.counters().items() if k in before} == before


def test_decorating_starts_nothing() -> None:
    code = """
import torch, torch_tpu
@torch.compile
def f(x): return x + 1
@torch.compile(backend="tpu", mode="max-autotune", fullgraph=True)
def g(x): return x + 1
module = torch.compile(torch.nn.Linear(2, 2))
from torch_tpu.runtime import process_client as client
assert client._client is None, "the client was started"
assert f(torch.ones(2, device="tpu")).tolist() == [2.0, 2.0] == g(torch.ones(2, device="tpu")).tolist()
assert client._client is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
