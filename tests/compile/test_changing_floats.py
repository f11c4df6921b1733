"""Python floats that change from call to call: the values of the CPU, and a bounded number of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from tests.compile.test_autograd_cache import cache  # noqa: F401
from torch_tpu import metrics
from torch_tpu.compile.frontend import changing_floats

STEPS = 6


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    counters.clear()


def graphs() -> int:
    """How often Dynamo captured a graph in this test."""
    return int(counters["stats"]["unique_graphs"])


def trained(device: str, make: Callable[..., Optimizer], schedule: Callable[..., Any]) -> list[Tensor]:
    """Parameters after some steps, of which the compiled one is on the device."""
    parameters = [torch.linspace(-1, 1, 6).add(i).to(device).requires_grad_() for i in range(3)]
    optimizer = make(parameters)
    scheduler = schedule(optimizer)
    step = torch.compile(optimizer.step) if device == "tpu" else optimizer.step
    for i in range(STEPS):
        for k, p in enumerate(parameters):
            p.grad = torch.arange(6.0).mul(i + 1).add(k).sin().to(device)
        step()
        scheduler.step()
    return [p.detach().cpu() for p in parameters]


def exponential(optimizer: Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_one_by_one": lambda p: SGD(p, lr=0.1, foreach=False),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adam_fused": lambda p: Adam(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_needs_two_graphs(name: str) -> None:
    """One for the first value, one for all others."""
    torch.testing.assert_close(
        trained("tpu", OPTIMIZERS[name], exponential), trained("cpu", OPTIMIZERS[name], exponential)
    )
    assert graphs() == 2


@pytest.mark.usefixtures("cache")
def test_a_cached_graph_is_not_that_of_another_value() -> None:
    """The derivative of a power takes the exponent as it is, so its graph holds for one value alone."""
    for _ in range(2):
        torch.compiler.reset()
        function = torch.compile(lambda x, t: x.abs() ** t)
        for t in (0.5, 0.75, 1.25, 2.0):
            x = torch.tensor([1.0, -4.0], device="tpu", requires_grad=True)
            y = function(x, t)
            y.sum().backward()
            torch.testing.assert_close(y.tolist(), [1.0, 4.0**t])
            torch.testing.assert_close(x.grad.tolist(), [t, -t * 4.0 ** (t - 1)])


FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "loss scale": lambda x, t: x.square().mean() * t,
    "sum": lambda x, t: (x.sin() + t) * (t - x) - t,
    "temperature": lambda x, t: F.softmax(x / t, -1),
    "alpha": lambda x, t: torch.add(x.sin(), x, alpha=t),
    "written": lambda x, t: x.sin().sub_(x, alpha=t),
    "bounds": lambda x, t: x.clamp(-t, t) + x.clamp(min=t) * 2 + x.clamp(max=t) * 3,
    "product": lambda x, t: torch.addcmul(x, x.sin(), x.cos(), value=t),
    "quotient": lambda x, t: torch.addcdiv(x, x.sin(), x.exp(), value=t),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_of_the_user(name: str) -> None:
    function = FUNCTIONS[name]
    # Derivatives of these two take the number as it is, which ties a graph to it.
    needs_gradients = name not in ("product", "quotient")
    compiled = torch.compile(function)
    for t in (0.5, 0.75, 1.25, 2.5, 0.3):
        host, device = (
            torch.linspace(-2, 3, 12).reshape(3, 4).to(d).requires_grad_(needs_gradients) for d in ("cpu", "tpu")
        )
        want, got = function(host, t), compiled(device, t)
        torch.testing.assert_close(got.cpu(), want)
        if needs_gradients:
            for value in (want, got):
                value.sum().backward()
            torch.testing.assert_close(device.grad.cpu(), host.grad)
    assert graphs() == 2


def test_a_whole_step_makes_no_program_again() -> None:
    """Forward, backward and update, with a loss scale and a learning rate that change."""
    parameters = {d: torch.linspace(-1, 1, 8).to(d).requires_grad_() for d in ("cpu", "tpu")}
    optimizers = {d: AdamW([p], lr=0.1, fused=True) for d, p in parameters.items()}

    def step(x: Tensor, parameter: Tensor, optimizer: Optimizer, scale: float) -> Tensor:
        loss = (x * parameter).tanh().sum() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    functions, made = {"cpu": step, "tpu": torch.compile(step)}, []
    for i in range(STEPS):
        losses = {}
        before = metrics.counters().get("program", 0)
        for d, p in parameters.items():
            optimizers[d].param_groups[0]["lr"] = 0.1 / (i + 1)
            losses[d] = functions[d](torch.arange(1.0, 9.0).div(8).to(d), p, optimizers[d], 2.0 + i / 4).cpu()
        made.append(metrics.counters().get("program", 0) - before)
        torch.testing.assert_close(losses["tpu"], losses["cpu"])
        torch.testing.assert_close(parameters["tpu"].detach().cpu(), parameters["cpu"].detach())
    assert made[3:] == [0] * 3


def test_a_graph_before_and_after() -> None:
    """A list operator with a number becomes one with a tensor; with a number that stays it is left as it is."""
    table = changing_floats.decompositions()
    operator = torch.ops.aten._foreach_add.List
    assert table[operator]([], [], alpha=0.5) is NotImplemented
    seen: list[list[Any]] = []

    def lists(x: Tensor, t: float) -> Any:
        return torch._foreach_add([x, x * 2], [x * 3, x], alpha=t)

    original = changing_floats._DECOMPOSITIONS[operator]

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append([kwargs["alpha"]])
        return original(*args, **kwargs)

    changing_floats._DECOMPOSITIONS[operator] = spied
    try:
        function = torch.compile(lists)
        for t in (0.5, 0.25, 3.0):
            got = function(torch.ones(2, device="tpu"), t)
            assert [g.tolist() for g in got] == [[1 + 3 * t] * 2, [2 + t] * 2]
    finally:
        changing_floats._DECOMPOSITIONS[operator] = original
    assert seen
    assert graphs() == 2
