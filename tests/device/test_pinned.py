"""Pinned memory is ordinary memory of the host, and says that it is pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from torch_tpu.device import pinned
from torch_tpu.patching.changes import Changes

FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, pin_memory=True),
    "zeros": lambda: torch.zeros(3, pin_memory=True),
    "ones": lambda: torch.ones(2, 3, pin_memory=True),
    "full": lambda: torch.full((3,), 2.0, pin_memory=True),
    "tensor": lambda: torch.tensor([1, 2], pin_memory=True),
    "arange": lambda: torch.arange(3, pin_memory=True),
    "linspace": lambda: torch.linspace(0, 1, 3, pin_memory=True),
    "eye": lambda: torch.eye(3, pin_memory=True),
    "rand": lambda: torch.rand(3, pin_memory=True),
    "randperm": lambda: torch.randperm(4, pin_memory=True),
    "empty_strided": lambda: torch.empty_strided((2, 2), (1, 2), pin_memory=True),
    "empty_like": lambda: torch.empty_like(torch.ones(2), pin_memory=True),
    "new_empty": lambda: torch.ones(2).new_empty(3, pin_memory=True),
    "new_zeros of the device's": lambda: torch.ones(2, device="tpu").new_zeros(3, device="cpu", pin_memory=True),
    "pin_memory": lambda: torch.ones(2).pin_memory(),
    "a view": lambda: torch.ones(2, 3, pin_memory=True)[1:, ::2],
}


@pytest.mark.parametrize("name", FACTORIES)
def test_made_pinned(name: str) -> None:
    made = FACTORIES[name]()
    assert made.device.type == "cpu"
    assert made.is_pinned()
    made.fill_(1)
    moved = made.to("tpu", non_blocking=True)
    assert moved.cpu().equal(made)
    assert not moved.is_pinned()
    assert not made.clone().is_pinned()


def test_values_and_sizes() -> None:
    assert torch.arange(3, pin_memory=True).tolist() == [0, 1, 2]
    grown = torch.ones(2, pin_memory=True)
    grown.resize_(1000).fill_(2)
    assert grown.sum() == 2000
    assert not torch.ones(3).is_pinned()
    assert not torch.zeros(2, pin_memory=True, device="tpu").is_pinned()
    assert torch.ones(3, pin_memory=True, device="tpu").tolist() == [1, 1, 1]


def test_saved_on_pinned_memory() -> None:
    x = torch.arange(4.0, device="tpu", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = x * x
    y.sum().backward()
    assert x.grad.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_loader(workers: int) -> None:
    loader = DataLoader(torch.arange(6.0), batch_size=3, pin_memory=True, num_workers=workers)
    batches = [(b.is_pinned(), b.to("tpu", non_blocking=True).tolist()) for b in loader]
    assert batches == [(True, [0, 1, 2]), (True, [3, 4, 5])]


def test_another_layout_of_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The entry is not replaced where the header says another thing, or is not there."""
    before = pinned._place_of_allocator
    header = tmp_path / "interface.h"
    monkeypatch.setattr(pinned, "_HEADER", header)
    with pytest.raises(OSError, match="interface"):
        pinned.give_allocator.change(Changes("test"))
    header.write_text("struct TORCH_API AcceleratorHooksInterface {\n  virtual bool isBuilt() const;\n};")
    with pytest.raises(ValueError, match="getPinnedMemoryAllocator"):
        pinned.give_allocator.change(Changes("test"))
    assert pinned._place_of_allocator == before
    assert torch.empty(3, pin_memory=True).is_pinned()


def test_another_order_of_functions_is_found_out(run_python: Any) -> None:
    """PyTorch must be seen to ask the entry; if it does not, everything is as before."""
    said = run_python("""
import torch, torch_tpu
from torch_tpu.device import pinned
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.changes import Changes
pinned.give_allocator.undo()
changes = Changes("test")
pinned._entry_of = lambda name: 25
try:
    pinned.give_allocator.change(changes)
except RuntimeError as error:
    print(type(error).__name__)
    changes.undo()
try:
    torch.empty(3, pin_memory=True)
except NotImplementedError as error:
    print("as before")
print(torch.ones(3, device="tpu").sum().item(), torch.ones(3).pin_memory().is_pinned())
""")
    assert said.splitlines() == ["NotImplementedError", "as before", "3.0 True"]
