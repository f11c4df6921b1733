"""A training step in fused mode needs hardly more memory than on the CPU. Bytes are counted, no time is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_tpu.eager.deferred import segment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYERS, WIDTH = 8, 256


def train(device: str) -> Callable[[], float]:
    """Each activation is large enough for short chunks, and small beside all of them."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(1024, WIDTH).to(device), torch.arange(1024).remainder(10).to(device)

    def step() -> float:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def test_a_training_step_needs_at_most_a_tenth_more_than_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    measure = importlib.import_module("memory")
    on_device, on_cpu = measure.peak_on_device(train), measure.peak_on_cpu(train)
    parameters = 4 * (LAYERS * (WIDTH * WIDTH + 3 * WIDTH) + WIDTH * 10 + 10)
    # Weights and two states, and all activations: gradients come as these go.
    assert on_cpu > 3 * parameters + 3 * LAYERS * 4 * 1024 * WIDTH
    assert on_device <= 1.1 * on_cpu


def test_what_a_pending_graph_holds_is_counted():
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        x = torch.ones(1000, device="tpu")
        torch.tpu.synchronize()
        before = torch.tpu.memory_allocated()
        y = x.sum()
        del x
        assert torch.tpu.memory_allocated() == before  # the sum has still to read it
        assert y.item() == 1000
        assert torch.tpu.memory_allocated() == before - 4000 + 4


def test_the_optimizer_step_needs_no_memory_of_its_own():
    model = nn.Linear(300, 300).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        torch.tpu.synchronize()
        before = torch.tpu.memory_allocated()
        torch.tpu.reset_peak_memory_stats()
        segment.clear()
        optimizer.step()  # which runs what it recorded
        assert torch.tpu.max_memory_allocated() - before < 4 * 300 * 300 / 2
        assert torch.tpu.memory_allocated() == before
