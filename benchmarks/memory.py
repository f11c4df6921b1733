"""Peak memory of a training step in fused eager, beside what CPU PyTorch allocates: `python benchmarks/memory.py`.

The CPU's is the sum of all allocations and releases that PyTorch's profiler sees; the device's counts live values, what
a pending graph holds, and results and temporaries of each program as XLA states them. `--check` exits with 1 if a model
needs more than 1.1 times the CPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

LIMIT = 1.1
MEASURED = "measured step"
F = nn.functional
Step = Callable[[], float]


class Block(nn.Module):
    """A layer of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The sizes of a model that trains on a laptop: 6 layers of width 256, 8 sequences of 128 bytes."""

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 8, length: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + y)


def cnn() -> nn.Module:
    """A small ResNet for images of 32×32."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class LSTM(nn.Module):
    """Predicts the next of 100 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def train_gpt(device: str) -> Step:
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    text = torch.randint(0, 256, (8, 129)).to(device)
    return _step(model, optimizer, text[:, :-1].contiguous(), text[:, 1:].contiguous())


def train_cnn(device: str) -> Step:
    torch.manual_seed(0)
    model = cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _step(model, optimizer, torch.randn(16, 3, 32, 32).to(device), torch.randint(0, 10, (16,)).to(device))


def train_lstm(device: str) -> Step:
    torch.manual_seed(0)
    model = LSTM().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    text = torch.randint(0, 100, (16, 33)).to(device)
    return _step(model, optimizer, text[:, :-1].contiguous(), text[:, 1:].contiguous())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> float:
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def peak_on_cpu(make: Callable[[str], Step]) -> int:
    """Bytes that PyTorch holds at most during the third step of a loop, weights and optimizer states included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make("cpu")
        step()
        step()
        with record_function(MEASURED):
            step()
    events = profiler.profiler.kineto_results.events()
    began = min(event.start_ns() for event in events if event.name() == MEASURED)
    held = most = 0
    for time, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += nbytes
        if time >= began:
            most = max(most, held)
    return most


def peak_on_device(make: Callable[[str], Step]) -> int:
    """The same on the device, in fused mode; of the fourth step, since the third may still compile something."""
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        step = make("tpu")
        for _ in range(3):
            step()
        torch.tpu.reset_peak_memory_stats()
        step()
        torch.tpu.synchronize()
        return torch.tpu.max_memory_allocated()


def main() -> int:
    table = Table("training step", "tpu MB", "cpu MB", "ratio")
    ratios = {}
    for name, make in {"GPT, AdamW": train_gpt, "CNN, SGD": train_cnn, "LSTM, Adam": train_lstm}.items():
        on_device, on_cpu = peak_on_device(make), peak_on_cpu(make)
        ratios[name] = on_device / on_cpu
        table.add_row(name, f"{on_device / 1e6:.1f}", f"{on_cpu / 1e6:.1f}", f"{ratios[name]:.2f}×")
    Console().print(table)
    return 1 if "--check" in sys.argv and max(ratios.values()) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
