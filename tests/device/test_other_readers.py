"""Readers of a tensor's memory: DLPack, numpy, other processes. They get the right elements or an error."""

from __future__ import annotations

import multiprocessing.reduction
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

EXPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": np.from_dlpack,
    "__dlpack__": lambda x: x.__dlpack__(),
    "__dlpack__ for the host": lambda x: x.__dlpack__(dl_device=(1, 0), copy=True),
    "__dlpack_device__": lambda x: x.__dlpack_device__(),
    "utils.to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "torch.to_dlpack": lambda x: torch.to_dlpack(x),
    "_C._to_dlpack": lambda x: torch._C._to_dlpack(x),
    "_C._to_dlpack_versioned": lambda x: torch._C._to_dlpack_versioned(x),
    "a parameter": lambda x: nn.Parameter(x).__dlpack__(),
    "in fused mode": lambda x: torch.from_dlpack(x + 1),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_dlpack_exports_nothing(name: str) -> None:
    """A capsule would carry an address nobody may read: it read as zeros."""
    fused = torch.tpu.EagerMode.DEFER_AND_FUSE if "fused" in name else torch.tpu.eager_mode
    with torch.tpu.set_eager_mode(fused), pytest.raises(BufferError, match=r"'tpu'.*\.cpu\(\)"):
        EXPORTS[name](torch.arange(3.0, device="tpu"))


def test_dlpack_of_the_host_is_untouched() -> None:
    x = torch.arange(3.0)
    for y in (
        torch.from_dlpack(x),
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
        torch.from_dlpack(torch._C._to_dlpack_versioned(x)),
        torch.from_dlpack(np.from_dlpack(x)),
    ):
        assert y.data_ptr() == x.data_ptr()
    assert x.__dlpack_device__() == (1, 0)
    assert torch.from_dlpack(np.arange(3.0), device="tpu").tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_numpy_is_told_to_copy() -> None:
    x = torch.arange(3.0, device="tpu")
    for read in (np.asarray, np.array, lambda x: x.numpy(), lambda x: x.__array__()):
        with pytest.raises(TypeError, match=r"can't convert tpu:0.*Tensor\.cpu\(\)"):
            read(x)
    assert x.numpy(force=True).tolist() == [0, 1, 2]


SENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "parameter": nn.Parameter,
    "storage": lambda x: x.untyped_storage(),
    "typed storage": lambda x: torch.TypedStorage(wrap_storage=x.untyped_storage(), dtype=x.dtype, _internal=True),
    "inside of a list": lambda x: [1, {"x": x}],
    "module": lambda x: nn.Linear(2, 2, device=x.device),
}


@pytest.mark.parametrize("name", SENT)
def test_other_processes_are_sent_copies(name: str) -> None:
    """What queues, pipes and arguments of processes are written with."""
    sent = SENT[name](torch.arange(3.0, device="tpu"))
    with pytest.raises(RuntimeError, match=r"on 'tpu' can't be sent.*\.cpu\(\).*\.to\('tpu'\)"):
        multiprocessing.reduction.ForkingPickler.dumps(sent)
    pickle.dumps(sent)  # a file is no process


def test_pipes_and_queues() -> None:
    x = torch.arange(3.0, device="tpu")
    receiver, sender = mp.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match=r"Send \.cpu\(\)"):
        sender.send(x)
    with pytest.raises(RuntimeError, match=r"Send \.cpu\(\)"):
        mp.SimpleQueue().put(x)
    sender.send(x.cpu())
    assert torch.equal(receiver.recv().to("tpu"), x)
    receiver.close()
    sender.close()


def test_a_queue_says_it_from_its_thread(run_python: Any) -> None:
    """`Queue.put` returns before the thread behind it writes, which prints its error."""
    script = """
import sys, time, torch, torch.multiprocessing as mp
if __name__ == "__main__":
    sys.stderr = sys.stdout
    queue = mp.get_context("spawn").Queue()
    queue.put(torch.ones(2, device="tpu"))
    queue.close()
    queue.join_thread()
"""
    assert "can't be sent to another process" in run_python(script)
