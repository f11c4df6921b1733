"""Threads: Python's, the autograd engine's, and first uses from either."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from torch_tpu.runtime import platform, process_client


def train(seed):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    reference.load_state_dict(module.state_dict())
    module.to("tpu")
    x = torch.randn(5, 4, generator=generator)
    for network, batch in ((module, x.to("tpu")), (reference, x)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            network(batch).pow(2).mean().backward()
            optimizer.step()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


def test_training_in_several_threads():
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))


def test_backward_runs_in_the_engine_thread():
    seen = []
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(threading.current_thread() is threading.main_thread()))
    y.sum().backward()
    assert seen == [False]
    assert x.grad.tolist() == [2, 2]
    with torch.autograd.set_multithreading_enabled(False):
        (x * 3).sum().backward()
    assert x.grad.tolist() == [5, 5]


def test_the_first_use_may_be_in_a_thread(run_python):
    script = """
import threading, torch, torch_tpu
results = []
def use():
    results.append((torch.ones(2, device="tpu") * 2).sum().item())
threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(results)
"""
    assert run_python(script).strip() == "[4.0, 4.0, 4.0, 4.0]"


def test_the_first_use_may_be_in_the_engine_thread(run_python):
    script = """
import torch, torch_tpu
class Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return (gradient.to("tpu") * 2).cpu()
x = torch.ones(2, requires_grad=True)
Move.apply(x).sum().backward()
print(x.grad.tolist())
"""
    assert run_python(script).strip() == "[2.0, 2.0]"


def test_modes_and_devices_hold_across_threads():
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.tpu.eager_mode).result() is torch.tpu.eager_mode


def test_an_interpreter_without_its_global_lock_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(RuntimeError, match="PYTHON_GIL=1"):
        process_client._start(platform.choose({"TORCH_TPU_PLATFORM": "cpu"}))


def test_two_threads_read_a_tensor_from_the_host_at_once() -> None:
    """jaxlib's first answer to where such a buffer lies is not made for two askers."""
    with ThreadPoolExecutor(2) as pool:
        for n in range(300):
            t = torch.full((39,), n).to("tpu")
            start = threading.Barrier(2)

            def read(t: torch.Tensor = t, start: threading.Barrier = start) -> int:
                start.wait()
                return int(t.cpu().sum())

            assert [f.result() for f in [pool.submit(read) for _ in range(2)]] == [39 * n] * 2
