"""A program that fails while it runs says so where its result is read, as PyTorch would, on every platform."""

from __future__ import annotations

import math

import pytest
import torch

from torch_tpu.eager.deferred import deferred_graph
from torch_tpu.runtime.process_client import client

EagerMode = torch.tpu.EagerMode


@torch.compile(backend="tpu")
def sum_of_sorted(column: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return (column + row).sort()[0].sum()


def too_large() -> torch.Tensor:
    """What depends on 4 TB inside a program; as a value of its own that would be refused at once."""
    return sum_of_sorted(torch.ones(10**5, 1, device="tpu"), torch.ones(10**7, device="tpu"))


@pytest.mark.parametrize("mode", list(EagerMode), ids=str)
@pytest.mark.parametrize(
    "read", [torch.Tensor.item, torch.Tensor.cpu, bool, lambda x: x[None].tolist()], ids=["item", "cpu", "bool", "list"]
)
def test_a_reader_gets_the_error(mode, read):
    with torch.tpu.set_eager_mode(mode):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=r"TPU out of memory.* at .*test_late_failures\.py"):
                read(too_large())
        assert torch.ones(3, device="tpu").sum().item() == 3
        torch.tpu.synchronize()


@pytest.mark.parametrize("mode", [EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE], ids=str)
def test_so_does_a_check(mode):
    """Whether an index is in bounds can't be said of one that was never computed."""
    with torch.tpu.set_eager_mode(mode):
        x = torch.arange(4.0, device="tpu")
        torch.tpu.synchronize()  # a value of the same fused program would fail with it
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="TPU out of memory"):
                x[(too_large() * 0).long()[None]].tolist()
        assert x[torch.tensor([1, 2], device="tpu")].tolist() == [1.0, 2.0]


def test_the_failed_value_fails_each_time_it_is_read():
    failed = too_large()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="TPU out of memory"):
            failed.item()
    with pytest.raises(torch.OutOfMemoryError, match="TPU out of memory"):
        (failed + 1).cpu()


def test_a_fault_in_the_message_leaves_nothing_behind(monkeypatch):
    """The failed program is forgotten all the same, so that nothing later meets it again."""
    with torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE):

        def no_words(error, place=""):
            raise KeyError("no words")

        with monkeypatch.context() as patched:
            patched.setattr(client(), "total_memory", math.inf)  # only the runtime finds that this is too much
            patched.setattr(deferred_graph, "translate", no_words)
            failed = torch.ones(10**13, device="tpu")
            with pytest.raises(KeyError, match="no words"):
                torch.tpu.synchronize()
        torch.tpu.synchronize()
        assert torch.ones(3, device="tpu").sum().item() == 3
        with pytest.raises(RuntimeError, match="never computed"):
            failed.sum().item()
