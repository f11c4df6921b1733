"""Long vectors, which XLA:CPU sorts by digits: order, places and values against the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tools.compare import check

SIZE = 2**14 + 3
I64 = torch.int64
LOW, HIGH = torch.iinfo(I64).min, torch.iinfo(I64).max


def _wide() -> torch.Tensor:
    """All 64 bits differ, which takes two parts; ties in the upper part, and ties altogether."""
    x = torch.randint(LOW, HIGH, (SIZE,))
    x[::5] = x[0] ^ torch.randint(4, x[::5].shape)
    x[:4] = torch.tensor([LOW, HIGH, HIGH, LOW])
    return x


def _with_nan(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(SIZE, dtype=torch.float64).to(dtype)
    x[::7], x[1::7], x[2::7] = math.nan, -0.0, 0.0
    x[5], x[6] = math.inf, -math.inf
    return x


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "wide": _wide,
    "40 bits": lambda: torch.randint(2**40, (SIZE,)),
    "negative": lambda: torch.randint(-(2**62), -(2**20), (SIZE,)),
    "few values": lambda: torch.randint(-3, 4, (SIZE,)),
    "two ends": lambda: torch.where(torch.rand(SIZE) < 0.5, LOW, HIGH),
    "all equal": lambda: torch.full((SIZE,), -7),
    "sorted": lambda: torch.arange(SIZE),
    "int32": lambda: torch.randint(-(2**31), 2**31 - 1, (SIZE,), dtype=torch.int32),
    "uint8": lambda: torch.randint(256, (SIZE,), dtype=torch.uint8),
    "bool": lambda: torch.rand(SIZE) < 0.5,
    "float32": lambda: _with_nan(torch.float32),
    "float64": lambda: _with_nan(torch.float64),
    "bfloat16": lambda: _with_nan(torch.bfloat16),
    "strided": lambda: torch.randint(HIGH, (SIZE, 3))[:, 1],
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(name: str, descending: bool) -> None:
    check(lambda x: x.sort(descending=descending, stable=True), MAKERS[name]())


@pytest.mark.parametrize("dim", [0, 1])
def test_rows(dim: int) -> None:
    x = torch.randint(LOW, HIGH, (SIZE, 3)).movedim(0, dim)
    x.select(1 - dim, 1).fill_(5)
    check(lambda x: [x.sort(dim=dim, stable=True), x.argsort(dim=dim, descending=True, stable=True)], x)


@pytest.mark.parametrize("dtype", [I64, torch.float64])
def test_topk_and_msort(dtype: torch.dtype) -> None:
    x = torch.randperm(SIZE).to(dtype) * 2**49
    check(lambda x: [x.topk(50), x.topk(9, largest=False), x.msort()], x)


def test_unique() -> None:
    """Without the inverse, numbers are sorted alone."""
    wide = _wide()
    check(lambda x: torch.unique(x), wide)
    check(lambda x: torch.unique(x, return_inverse=True, return_counts=True), wide)
    check(lambda x: torch.unique(x), torch.randint(-(2**31), 2**31 - 1, (SIZE,), dtype=torch.int32))


def test_gradient() -> None:
    check(lambda x: x.sort()[0], torch.randn(SIZE, requires_grad=True))


def test_compiled() -> None:
    x = torch.randint(2**50, (SIZE,))
    compiled = torch.compile(lambda x: (x * 2 + 1).sort(stable=True))
    values, order = compiled(x.to("tpu"))
    wanted = (x * 2 + 1).sort(stable=True)
    assert torch.equal(values.cpu(), wanted[0])
    assert torch.equal(order.cpu(), wanted[1])
