"""A training loop compiles nothing after its third step, and a new shape once, in every execution mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_tpu import metrics

EagerMode = torch.tpu.EagerMode
STEPS = 21
MODES = {"strict": EagerMode.DEFER_NEVER, "fused": EagerMode.DEFER_AND_FUSE, "compiled": EagerMode.DEFER_NEVER}


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.tpu.set_eager_mode(MODES[request.param]):
        yield request.param


def programs() -> float:
    """How many programs this process has got so far, from the compiler or from the disk, or traced."""
    counters = metrics.counters()
    return sum(counters.get(name, 0) for name in ("program", "compile", "disk_cache_hit"))


class Attention(nn.Module):
    """One head. Without dropout the CPU can be compared."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # A bias of keys has a gradient of nothing but rounding errors, which AdamW makes large.
        self.qkv, self.dropout = nn.Linear(8, 24, bias=False), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.dropout(nn.functional.scaled_dot_product_attention(q, k, v))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.word = nn.Embedding(11, 8)
        self.layers = nn.Sequential(Attention(dropout), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.word(x))


def train(
    device: str, compiled: bool, dropout: float, autocast: bool, fused_optimizer: bool
) -> tuple[list[float], list[float]]:
    """Everything a loop may do to recompile; losses and averages, and the number of programs after each step."""
    torch.manual_seed(0)
    model = Model(dropout).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, fused=fused_optimizer)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        ],
        milestones=[5],
    )
    call = torch.compile(model) if compiled else model
    data = torch.randint(0, 11, (2 * STEPS, 4, 7), generator=torch.Generator().manual_seed(1)).to(device)
    read, counts = [], []
    for step in range(STEPS):
        for batch in data[2 * step : 2 * step + 2]:
            with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 10 == 9:
            read.append(loss.item())
        counts.append(programs())
    return [*read, *(p.sum().item() for p in average.parameters())], counts


@pytest.mark.parametrize("fused_optimizer", [False, True], ids=["plain", "fused_adamw"])
def test_nothing_is_compiled_after_the_third_step(mode, fused_optimizer):
    torch._dynamo.reset()
    _, counts = train("tpu", mode == "compiled", dropout=0.1, autocast=True, fused_optimizer=fused_optimizer)
    assert counts[-1] == counts[2], counts


@pytest.mark.parametrize("mode", ["strict", "fused"], indirect=True)
def test_the_loop_trains_as_on_the_cpu(mode):
    got, counts = train("tpu", False, dropout=0.0, autocast=False, fused_optimizer=False)
    want, _ = train("cpu", False, dropout=0.0, autocast=False, fused_optimizer=False)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert counts[-1] == counts[2], counts


def test_a_shape_is_compiled_once_and_the_report_says_so(mode):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to("tpu")
    call = torch.compile(model, dynamic=False) if mode == "compiled" else model
    counts = []
    for size in (13, 17, 13, 17, 19, 17, 19, 13):
        loss = call(torch.ones(size, 3).to("tpu")).square().mean()
        loss.backward()
        model.zero_grad()
        torch.tpu.synchronize()
        counts.append(programs())
        if size == 19 and counts[-2:] != counts[-1:] * 2:
            text = metrics.report(most=1000)
    assert counts[1] == counts[3]
    assert counts[4] == counts[7]
    assert counts[0] < counts[1] < counts[4]
    assert "[17, 3] → [19, 3]" in text if mode != "compiled" else "expected 17, actual 19" in text
