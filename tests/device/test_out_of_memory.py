"""More memory than there is: the error is one that libraries know as a reason for a smaller batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size

from torch_tpu.runtime.process_client import client

MANY = 10**13
LINE = r"(?s)^TPU out of memory\..*test_out_of_memory\.py:\d+"


def one() -> torch.Tensor:
    return torch.ones(1, device="tpu")


TOO_MUCH: dict[str, Callable[[], Any]] = {
    "read": lambda: torch.zeros(MANY, device="tpu").sum().item(),
    "made": lambda: torch.zeros(MANY, device="tpu"),
    "empty": lambda: torch.empty(MANY, device="tpu"),
    "more than any address space": lambda: torch.empty(10**18, device="tpu"),
    "strided": lambda: torch.empty_strided((MANY,), (1,), device="tpu"),
    "random": lambda: torch.randn(10**6, 10**7, device="tpu"),
    "a copy": lambda: one().expand(MANY).clone(),
    "broadcast": lambda: torch.outer(*[torch.ones(10**7, device="tpu")] * 2),
    "product": lambda: torch.ones(10**6, 1, device="tpu") @ torch.ones(1, 10**7, device="tpu"),
    "resized": lambda: one().resize_(MANY),
    "storage": lambda: torch.UntypedStorage(MANY, device="tpu"),
    "compiled": lambda: torch.compile(lambda x: x.expand(MANY) * 2)(one()),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TOO_MUCH)
def test_more_than_the_device_has(name: str, fused: bool) -> None:
    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    refused = torch.tpu.memory_stats()["num_ooms"]
    with torch.tpu.set_eager_mode(mode):
        with pytest.raises(torch.OutOfMemoryError, match=LINE) as raised:
            TOO_MUCH[name]()
        assert should_reduce_batch_size(raised.value)
        assert torch.tpu.memory_stats()["num_ooms"] == refused + 1
        assert torch.ones(3, device="tpu").sum().item() == 3


LATE: dict[str, Callable[[], Any]] = {
    "read": lambda: torch.zeros(MANY, device="tpu") + one(),
    "unwritten": lambda: torch.empty(MANY, device="tpu") + 1,
    "compiled": lambda: torch.compile(lambda x: x.expand(MANY) * 3)(one()),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LATE)
def test_what_only_the_runtime_finds(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that fit one by one may not fit together, which is known where a program runs."""
    monkeypatch.setattr(client(), "total_memory", math.inf)
    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    with torch.tpu.set_eager_mode(mode):
        held = None
        with pytest.raises(torch.OutOfMemoryError, match=LINE) as raised:
            torch.tpu.synchronize((held := LATE[name]()).device)
        del held
        assert should_reduce_batch_size(raised.value)
        assert torch.ones(3, device="tpu").sum().item() == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_fits_is_found(fused: bool) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=MANY, reduce_batch_size_fn=lambda: 10 ** (12 - 4 * len(tried)))
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        weight = torch.ones(4, 1, device="tpu", requires_grad=True)
        (torch.ones(batch_size, 4, device="tpu") @ weight).sum().backward()
        return float(weight.grad.sum())

    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    with torch.tpu.set_eager_mode(mode):
        assert train() == 4 * tried[-1]
    assert tried == [MANY, 10**8, 10**4][: len(tried)]
    assert len(tried) > 1


def test_errors_of_the_host_stay_its_own() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        torch.ones(1).expand(MANY).to("tpu")
    assert should_reduce_batch_size(raised.value)


def test_arrays_that_jaxlib_made_for_itself_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of the largest is part of the error: it must not fail where jaxlib says nothing of an array."""
    array = SimpleNamespace(aval=SimpleNamespace(dtype=np.dtype("float32"), shape=(2, 3)))
    monkeypatch.setattr(client(), "_client", SimpleNamespace(live_arrays=lambda: [SimpleNamespace(aval=None), array]))
    assert client().largest_live(5) == ["1 × float32[2, 3] = 0.0 MiB"]
