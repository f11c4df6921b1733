"""Calls of a compiled graph that differ in nothing but data are recognised; others still get their own program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_tpu.compile.program.call_cache import Recall


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call that was compared with an earlier one was recognised."""
    torch.compiler.reset()
    found: list[bool] = []
    original = Recall.signature

    def signature(self, tensors):
        sig = original(self, tensors)
        found.append(sig is not None)
        return sig

    monkeypatch.setattr(Recall, "signature", signature)
    yield found
    torch.compiler.reset()


def test_new_data_is_recognised_forward_and_backward(recognised: list[bool]) -> None:
    weight = torch.eye(3, device="tpu").requires_grad_()
    function = torch.compile(lambda x: (x @ weight).square().sum())
    for i in (1.0, 2.0, 3.0):
        weight.grad = None
        function(torch.full((2, 3), i, device="tpu")).backward()
        assert weight.grad.tolist() == [[4 * i * i] * 3] * 3
        with torch.no_grad():
            weight.data = torch.eye(3, device="tpu")  # another storage
    assert recognised == [True] * 4


def test_other_layouts_are_not(recognised: list[bool]) -> None:
    function = torch.compile(lambda x, y: x * 2 + y)
    x, y = torch.arange(6.0, device="tpu"), torch.arange(6.0, device="tpu").reshape(2, 3)
    big = torch.arange(12.0, device="tpu").reshape(4, 3)
    want = lambda x, y: (x.cpu() * 2 + y.cpu()).tolist()  # noqa: E731
    a = x.view(2, 3)
    for left, right in [(y, y.clone()), (a, y), (big[:2], y), (big[2:], y), (big[1:3], y), (y, y.clone())]:
        assert function(left, right).tolist() == want(left, right)
    # The same way to view the same kind of value: recognised only where the place is the same too.
    assert recognised == [False, False, False, False, False]


def test_written_arguments(recognised: list[bool]) -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    function = torch.compile(write)
    for _ in range(2):
        x, y = torch.zeros(3, device="tpu"), torch.ones(3, device="tpu")
        assert function(x, y).tolist() == [2.0] * 3
        assert x.tolist() == [1.0] * 3
    assert recognised == [True]
    x = torch.zeros(3, device="tpu")
    function(x, x.detach())
    assert x.tolist() == [1.0] * 3
    assert recognised == [True, False]


def test_settings_and_memory_nobody_has_written(recognised: list[bool]) -> None:
    function = torch.compile(lambda x: x @ x)
    function(torch.ones(2, 2, device="tpu"))
    assert function(torch.empty(2, 2, device="tpu")).shape == (2, 2)
    complex_ = torch.compile(lambda x: x * 1)
    z = torch.tensor([1 + 2j], device="tpu")
    assert [complex_(z).tolist(), complex_(z.conj()).tolist()] == [[1 + 2j], [1 - 2j]]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        function(torch.ones(2, 2, device="tpu"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert recognised[0]
