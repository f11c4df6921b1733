"""Reports about training: resuming, growing inputs, random numbers per step, autocast, memory over steps."""

from __future__ import annotations

import copy
import gc
import io
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import assert_same
from torch_tpu import metrics

DEBUG = torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


class Run:
    """A small classifier with its optimizer and schedule."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = [torch.nn.Embedding(9, 6), torch.nn.Flatten(), torch.nn.Linear(24, 9)]
        self.module = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 16)

    def parts(self) -> list[Any]:
        return [self.module, self.optimizer, self.schedule]

    def losses(self, steps: range) -> list[float]:
        seen = []
        for step in steps:
            x = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(step)).to(self.device)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.module(x), x[:, 0])
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            seen.append(loss.item())
        return seen


@pytest.mark.parametrize("map_location", ["cpu", "tpu"])
def test_resumed_training_goes_on(map_location: str) -> None:
    """State lost between save and load: pytorch/xla#4482, pytorch/xla#1245."""
    whole = Run("tpu").losses(range(8))
    first = Run("tpu")
    losses = first.losses(range(4))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts()], file)
    file.seek(0)
    second = Run("tpu")
    for part, state in zip(second.parts(), torch.load(file, map_location=map_location), strict=True):
        part.load_state_dict(state)
    losses += second.losses(range(4, 8))
    assert losses == whole
    # Eight updates of a loss near 2.2; each may round differently in the last bit.
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(Run("cpu").losses(range(8))), rtol=1e-4, atol=1e-5)


def test_optimizer_state_after_load_stays_where_it_was() -> None:
    """`step` moved to the device and fetched back each time: pytorch/pytorch#74424."""
    first = Run("tpu")
    first.losses(range(3))
    second = Run("tpu")
    second.module.load_state_dict(copy.deepcopy(first.module.state_dict()))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.schedule.load_state_dict(first.schedule.state_dict())
    for state in second.optimizer.state.values():
        assert state["step"].device.type == "cpu"
        assert state["step"].item() == 3
        assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "tpu"
    before = dict(metrics.counters())
    second.losses(range(3, 6))
    after = metrics.counters()
    assert after["program"] == before["program"]
    # One number per step: the loss that is asked for.
    assert after["device_to_host_bytes"] - before["device_to_host_bytes"] == 3 * 4
    first.losses(range(3, 6))
    for ours, theirs in zip(second.module.parameters(), first.module.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def generate(device: str, steps: int) -> list[list[int]]:
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(11, 8).to(device), torch.nn.Linear(8, 11).to(device)
    tokens = torch.tensor([[1, 2]], device=device)
    with torch.no_grad():
        for _ in range(steps):
            h = embedding(tokens)
            mask = torch.full((tokens.shape[1],) * 2, -1e9, device=device).triu(1)
            h = torch.softmax(h @ h.transpose(1, 2) + mask, -1) @ h
            tokens = torch.cat([tokens, head(h[:, -1]).argmax(-1, keepdim=True)], 1)
    result: list[list[int]] = tokens.tolist()
    return result


def test_growing_sequence_compiles_each_length_once() -> None:
    """Every token a new program, every time: pytorch/xla#6614, huggingface/transformers#18661."""
    tokens = generate("tpu", 5)
    assert tokens == generate("cpu", 5)
    compiled = metrics.counters().get("program", 0)
    assert generate("tpu", 5) == tokens
    assert metrics.counters().get("program", 0) == compiled


def test_dropout_and_noise_change_with_each_step() -> None:
    """A seed that became part of the program: pytorch/xla#1932, pytorch/xla#2636."""
    torch.manual_seed(0)
    dropout, x = torch.nn.Dropout(0.25).to("tpu"), torch.ones(64, 64, device="tpu")
    kept = [dropout(x).cpu() for _ in range(4)]
    noise = [torch.randn_like(x).cpu() for _ in range(4)]
    for i in range(4):
        assert set(kept[i].unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
        # 4096 draws: the mean of a mask lies within 0.05 (seven standard deviations) of its probability.
        assert abs((kept[i] == 0).float().mean().item() - 0.25) < 0.05
        for j in range(i):
            assert not torch.equal(kept[i], kept[j])
            assert not torch.equal(noise[i], noise[j])
    assert torch.equal(dropout.eval()(x).cpu(), x.cpu())
    ones = torch.ones(500, device="tpu", requires_grad=True)
    y = F.dropout(ones, 0.5)
    y.sum().backward()
    assert_same(ones.grad, y.detach().cpu())


def test_autocast_dtypes() -> None:
    """Regions of lower precision missing or borrowed: pytorch/xla#5505, pytorch/pytorch#115900."""
    module, x = torch.nn.Linear(4, 4).to("tpu"), torch.randn(3, 4).to("tpu")
    target = torch.zeros(3, dtype=torch.long, device="tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("tpu")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("tpu") is torch.bfloat16
        y = module(x)
        assert y.dtype is (x @ x.t()).dtype is torch.bfloat16
        assert (y + x).dtype is F.cross_entropy(y, target).dtype is F.mse_loss(y, x).dtype is torch.float32
        with torch.autocast("tpu", enabled=False):
            assert module(x).dtype is torch.float32
        loss = y.float().square().mean()
    assert not torch.is_autocast_enabled("tpu")
    assert module(x).dtype is torch.float32
    loss.backward()
    assert module.weight.dtype is module.weight.grad.dtype is torch.float32

    @torch.autocast("tpu", dtype=torch.bfloat16)
    def product(t: torch.Tensor) -> torch.Tensor:
        return t @ t.t()

    assert product(x).dtype is torch.bfloat16
    # bfloat16 keeps eight bits.
    torch.testing.assert_close(y.float().cpu(), module(x).detach().cpu(), rtol=3e-2, atol=3e-2)


def test_low_precision_in_place_with_numbers() -> None:
    """A Python number that widens a bfloat16 graph: pytorch/xla#1929."""
    layer, x = torch.nn.Linear(5, 3).to("tpu", torch.bfloat16), torch.rand(8, 5).to("tpu", torch.bfloat16)
    y = layer(x.requires_grad_())
    y *= 0.5
    y += 1
    y.sum().backward()
    assert y.dtype is x.grad.dtype is layer.weight.grad.dtype is torch.bfloat16
    want = (layer.weight.float().sum(0) * 0.5).detach().cpu()
    torch.testing.assert_close(x.grad[0].float().cpu(), want, rtol=1e-2, atol=1e-2)  # bfloat16 keeps eight bits
    counts = torch.ones(2, dtype=torch.int64, device="tpu")
    with pytest.raises(RuntimeError, match="can't be cast"):
        counts += 0.5
    assert counts.tolist() == [1, 1]


# --- memory ------------------------------------------------------------------------------------------------------


def _step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = module(torch.randn(256, 256).to("tpu")).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_is_steady_over_steps() -> None:
    """Host memory that grows with the number of steps: pytorch/xla#1512, pytorch/xla#4863, pytorch/xla#6380."""
    module = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)).to("tpu")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(30):
        _step(module, optimizer)
    torch.tpu.synchronize()
    gc.collect()
    gc.disable()
    try:
        resident, allocated = _resident(), torch.tpu.memory_allocated()
        torch.tpu.reset_peak_memory_stats()
        _step(module, optimizer)
        peak = torch.tpu.max_memory_allocated()
        for _ in range(100):
            _step(module, optimizer)
        torch.tpu.synchronize()
        assert torch.tpu.memory_allocated() == allocated
        assert torch.tpu.max_memory_allocated() == peak
    finally:
        gc.enable()
    # A step moves 256 KiB to the device and makes as much again: kept, they would be over 100 MB.
    assert _resident() - resident < 40 << 20


MADE = 1 << 16  # bytes of one tensor below


def fails(function: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        function()


LIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "result": lambda x: x + 1,
    "view": lambda x: (x + 1)[3:5].t(),
    "in place": lambda x: x.clone().add_(1),
    "in place through a view": lambda x: x.clone()[::2].mul_(2),
    "several results": lambda x: x.sort(1),
    "graph": lambda x: (x.clone().requires_grad_().exp() * 2).sum(),
    "foreach": lambda x: torch._foreach_add([x, x], 1),
    "error": lambda x: fails(lambda: torch.add(x * 2, torch.ones(3, device="tpu"))),
    "index out of range": lambda x: fails(lambda: (x * 2)[torch.tensor([999], device="tpu")]),
    "random": lambda x: F.dropout(torch.randn_like(x)),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(0, device="tpu")),
    "set_": lambda x: torch.empty(0, device="tpu").set_((x * 2).untyped_storage()),
    "resize_": lambda x: (x * 2).resize_(1 << 15),
    "storage": lambda x: (x * 2).untyped_storage(),
    "copy to the host": lambda x: (x * 2).cpu(),
}


@pytest.mark.parametrize("name", LIVES)
def test_memory_is_free_when_the_last_user_dies(name: str) -> None:
    """Values kept by cycles, caches or tracebacks: pytorch/xla#4863."""
    x = torch.randn(128, 128).to("tpu")
    assert x.nbytes == MADE
    gc.collect()
    gc.disable()
    try:
        LIVES[name](x)  # whatever is made once: programs, small constants
        torch.tpu.synchronize()
        before = torch.tpu.memory_allocated()
        kept = LIVES[name](x)
        assert name in ("error", "index out of range", "copy to the host") or torch.tpu.memory_allocated() > before
        del kept
        assert torch.tpu.memory_allocated() == before
    finally:
        gc.enable()


def test_peak_is_what_lived_at_one_time() -> None:
    """A peak that counts what is already free, or misses what is not: pytorch/xla#6380."""
    x = torch.randn(128, 128).to("tpu")
    (x.neg(), x.neg())
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.max_memory_allocated()
    for _ in range(3):
        y = x.neg()
        del y
    assert torch.tpu.max_memory_allocated() - before == MADE
    kept = [x.neg() for _ in range(3)]
    assert torch.tpu.max_memory_allocated() - before == 3 * MADE
    alias = kept[0].view(-1)[::2]
    shared = kept[1].clone()
    assert torch.tpu.memory_allocated() - before == 3 * MADE  # a view is nothing, a clone is nothing until written
    shared.add_(1)
    del kept
    assert torch.tpu.memory_allocated() - before == 2 * MADE  # the base of `alias`, and `shared`
    del alias, shared
    assert torch.tpu.memory_allocated() == before


# --- debug eager -------------------------------------------------------------------------------------------------


def everything_random(device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    layers = [
        torch.nn.Linear(8, 8),
        torch.nn.Dropout(0.5),
        torch.nn.GELU(),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 3),
    ]
    module = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    results = []
    for _ in range(3):
        x = torch.randn(6, 8, device=device)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), torch.randint(3, (6,), device=device))
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    noise = torch.empty(2, 5, device=device)
    results += [torch.randperm(20, device=device), noise[1].uniform_(), torch.bernoulli(noise.normal_().sigmoid())]
    noise[:, ::2].exponential_()
    own = torch.Generator(device).manual_seed(4)
    results += [noise, torch.rand(4, device=device, generator=own), torch.multinomial(noise.abs(), 2)]
    return [*results, *module.state_dict().values()]


def test_debug_mode_gives_the_same_results() -> None:
    """A mode for debugging in which the fault is gone: pytorch/xla#2636."""
    strict = everything_random("tpu")
    with torch.tpu.set_eager_mode(DEBUG):
        blocking = everything_random("tpu")
    for got, want in zip(blocking, strict, strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got.cpu(), want.cpu())
