"""Samplers refuse what the CPU refuses: at the first call, and at a later one whose program is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

aten = torch.ops.aten
EagerMode = torch.tpu.EagerMode
MODES = pytest.mark.parametrize("mode", [EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
Call = Callable[[torch.Tensor], Any]


def _ones(p: torch.Tensor) -> torch.Tensor:
    return torch.ones(2, device=p.device)


# Of two numbers in a tensor.
TENSORS: dict[str, Call] = {
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda p: _ones(p).bernoulli_(p),
    "bernoulli_ of one number": lambda p: _ones(p).bernoulli_(p[1]),
    "bernoulli_ of a host number": lambda p: _ones(p).bernoulli_(p[1].cpu()),
    "bernoulli of another shape": lambda p: aten.bernoulli.Tensor(_ones(p), p),
    "bernoulli into out": lambda p: torch.bernoulli(p, out=_ones(p)),
    "normal": lambda p: torch.normal(0.0, p),
    "normal of one deviation": lambda p: torch.normal(0.0, p[1]),
    "normal of tensors": lambda p: torch.normal(_ones(p), p),
    "normal into out": lambda p: torch.normal(_ones(p), p, out=_ones(p)),
    "multinomial": lambda p: torch.multinomial(p, 1),
    "multinomial with replacement": lambda p: torch.multinomial(p, 1, True),
    "multinomial of a row that sums to zero": lambda p: torch.multinomial(torch.stack([p, p - p]), 1),
    "multinomial into out": lambda p: torch.multinomial(p, 1, out=torch.empty(0, dtype=torch.int64, device=p.device)),
    "poisson": torch.poisson,
}
# Of a number that is data.
NUMBERS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "bernoulli_": lambda t, p: t.bernoulli_(p),
    "bernoulli": lambda t, p: torch.bernoulli(t, p),
    "native_dropout": lambda t, p: torch.native_dropout(t, p, True)[0],
    "dropout": lambda t, p: torch.nn.functional.dropout(t, p),
    "geometric_": lambda t, p: t.geometric_(p),
    "geometric": lambda t, p: aten.geometric(t, p),
    "exponential_": lambda t, p: t.exponential_(p),
    "exponential": lambda t, p: aten.exponential(t, p),
    "cauchy_": lambda t, p: t.cauchy_(0.0, p),
    "log_normal_": lambda t, p: t.log_normal_(0.0, p),
    "log_normal": lambda t, p: aten.log_normal(t, 0.0, p),
    "normal_": lambda t, p: t.normal_(0.0, p),
    "normal": lambda t, p: torch.normal(t, p),
    "normal into out": lambda t, p: torch.normal(t, p, out=torch.empty_like(t)),
    "normal_functional": lambda t, p: aten.normal_functional(t, 0.0, p),
    "uniform_": lambda t, p: t.uniform_(0.25, p),
    "uniform": lambda t, p: aten.uniform(t, 0.25, p),
}


def _error(call: Callable[[], torch.Tensor]) -> Exception | None:
    try:
        call().cpu()
    except (RuntimeError, ValueError) as error:
        return error
    return None


def _compared(known: Exception | None, raised: Exception | None) -> None:
    assert type(raised) is type(known)
    # Fused mode adds the operator and the line; the CPU, where asked for a stack, its own.
    begin = str(known).partition("  (Could")[0].splitlines()[0]
    assert begin.startswith("invalid multinomial") or str(raised).startswith(begin)


@MODES
@pytest.mark.parametrize("name", TENSORS)
def test_numbers_in_a_tensor(name: str, mode: EagerMode) -> None:
    call = TENSORS[name]
    refused = 0
    with torch.tpu.set_eager_mode(mode):
        for p in (0.5, 3.0, 1.0, -1.0, math.nan, 0.25, math.inf):
            given = torch.tensor([0.5, p])
            known = _error(lambda given=given: call(given))
            _compared(known, _error(lambda given=given: call(given.to("tpu"))))
            refused += known is not None
    assert refused


@MODES
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_data(name: str, mode: EagerMode) -> None:
    call = NUMBERS[name]
    refused = 0
    with torch.tpu.set_eager_mode(mode):
        for p in (0.5, 2.0, 0.75, -1.0, math.nan, 0.25):
            host = torch.ones(2)
            known = _error(lambda host=host, p=p: call(host, p))
            t = torch.ones(2, device="tpu")
            _compared(known, _error(lambda t=t, p=p: call(t, p)))
            refused += known is not None
            assert known is None or t.tolist() == [1, 1]
    assert refused


def test_dtypes_of_a_binomial() -> None:
    n, p = torch.ones(2, device="tpu"), torch.full((2,), 0.5, dtype=torch.float64, device="tpu")
    with pytest.raises(RuntimeError, match="Found dtype Double but expected Float"):
        torch.binomial(n, p)


def test_a_compiled_graph_looks_too() -> None:
    draw = torch.compile(lambda p: torch.bernoulli(p) + 1)
    assert draw(torch.ones(2, device="tpu")).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="Expected p_in >= 0 && p_in <= 1"):
        draw(torch.full((2,), 1.5, device="tpu"))
    assert draw(torch.zeros(2, device="tpu")).tolist() == [1, 1]


@MODES
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x.view(-1)])
def test_a_refused_draw_leaves_the_old_values(view: Call, mode: EagerMode) -> None:
    with torch.tpu.set_eager_mode(mode):
        x = torch.arange(6.0, device="tpu").reshape(2, 3).sin()
        target = view(x)

        def draw() -> None:
            target.bernoulli_(torch.full_like(target, 1.5))
            torch.accelerator.synchronize()  # fused mode raises here

        with pytest.raises(RuntimeError, match="Expected p_in >= 0"):
            draw()
        torch.testing.assert_close(x.cpu(), torch.arange(6.0).reshape(2, 3).sin())
