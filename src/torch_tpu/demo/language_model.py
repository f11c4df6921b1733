"""A character-level GPT trained on CPython's help texts, on the device and on the CPU from the same start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from torch_tpu import progress

PROMPT = "The "
TOLERANCE = 1e-4  # largest loss difference between the devices over the first COMPARED steps
COMPARED = 20
# Fewer steps teach it too little to show.
FEWEST = 60
# What a sample may take, by the clock, and how much of it is written in any case.
SAMPLE_SECONDS = 12.0
LEAST_WRITTEN = 40


@dataclass(frozen=True)
class Size:
    """Width, layers, heads, context length (tokens), batch (sequences), and training steps."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    sample: int


QUICK = Size(width=64, layers=2, heads=4, context=64, batch=16, steps=200, sample=120)
FULL = Size(width=128, layers=4, heads=4, context=128, batch=16, steps=600, sample=300)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.attention_norm(x)).split(width, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return hidden


class GPT(nn.Module):
    """Decoder-only transformer: (batch, length) int64 token ids → (batch, length, symbols) logits."""

    def __init__(self, size: Size, symbols: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(symbols, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, symbols)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Text:
    """The training text as ids of its symbols."""

    symbols: str
    ids: torch.Tensor

    @classmethod
    def of_python_topics(cls) -> Text:
        text = "".join(c for name in sorted(topics) for c in topics[name] if c.isascii())
        symbols = "".join(sorted(set(text)))
        numbers = {c: i for i, c in enumerate(symbols)}
        return cls(symbols, torch.tensor([numbers[c] for c in text]))

    def batch(self, size: Size, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows and the same windows one symbol later, each (batch, context); a function of the step alone."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(self.ids) - size.context - 1, (size.batch,), generator=generator)
        window = torch.stack([self.ids[s : s + size.context + 1] for s in starts.tolist()])
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def learning_rate(step: int, steps: int, peak: float = 2e-3) -> float:
    """Linear warm-up over a tenth of the run, then a cosine to zero."""
    warm = max(1, steps // 10)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    device: str,
    size: Size,
    text: Text,
    advance: Callable[[int, str], None] = lambda count, note: None,
    until: float = math.inf,
) -> tuple[GPT, list[float]]:
    """Trains from a fixed start; the model and the loss of every step (cross-entropy in nats per symbol).

    Args:
        until: no further step begins after this time, by `time.perf_counter`, but for the first `COMPARED`.
    """
    torch.manual_seed(0)
    model = GPT(size, len(text.symbols)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses: list[float] = []
    for step in range(size.steps):
        if step >= COMPARED and time.perf_counter() > until:
            break
        optimizer.param_groups[0]["lr"] = learning_rate(step, size.steps)
        inputs, targets = (t.to(device) for t in text.batch(size, step))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        advance(1, f"loss {losses[-1]:.3f}")
    return model, losses


def steps_within(seconds: float, each: float, most: int) -> int:
    """How many steps that take so long each fit into a time, in tens."""
    return max(FEWEST, min(most, int(seconds / each) // 10 * 10))


def _adapted(size: Size, text: Text, console: Console, seconds: float) -> Size:
    """The same with as many steps as the device can do in about half of a time; the CPU gets the other half."""
    began = time.perf_counter()
    with progress.shown("first steps on tpu, compiling included", console=console):
        train("tpu", replace(size, steps=2), text)
        start = time.perf_counter()
        train("tpu", replace(size, steps=4), text)
    each = (time.perf_counter() - start) / 4
    found = replace(size, steps=steps_within((seconds - (time.perf_counter() - began)) / 2, each, size.steps))
    fewer = f" ({size.steps} where there is more time)" if found.steps < size.steps else ""
    takes = progress.duration(found.steps * each)
    progress.say(
        f"{found.steps} steps{fewer}: about {takes} on the device, and then on the CPU the first {COMPARED} at least",
        console,
    )
    return found


def sample(model: GPT, size: Size, text: Text, prompt: str) -> str:
    """Continues a prompt by up to `size.sample` symbols drawn from the model, on its device."""
    device = next(model.parameters()).device
    known = [text.symbols.index(c) for c in prompt]
    # A window of fixed length: a growing one would compile again for each new length.
    ids = torch.zeros(1, size.context, dtype=torch.int64, device=device)
    ids[0, : len(known)] = torch.tensor(known, device=device)
    result = list(known)
    model.eval()
    torch.manual_seed(0)
    began = time.perf_counter()
    with torch.no_grad():
        for written in range(size.sample):
            if written >= LEAST_WRITTEN and time.perf_counter() - began > SAMPLE_SECONDS:
                break
            end = min(len(result), size.context)
            probabilities = torch.softmax(model(ids)[0, end - 1] / 0.8, -1)
            drawn = torch.multinomial(probabilities, 1)
            result.append(int(drawn.item()))
            if end < size.context:
                ids[0, end] = drawn[0]
            else:
                ids = torch.cat([ids[:, 1:], drawn.view(1, 1)], 1)
    return "".join(text.symbols[i] for i in result)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Saves the loss curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per symbol)", title="The same training on two devices")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(console: Console, quick: bool, output: Path, until: float) -> bool:
    """Trains on both devices; whether the first `COMPARED` losses agree within `TOLERANCE` and the loss fell.

    Args:
        until: when it should be through, by `time.perf_counter`.
    """
    text = Text.of_python_topics()
    until -= SAMPLE_SECONDS
    size = _adapted(QUICK if quick else FULL, text, console, until - time.perf_counter())
    console.print(f"{len(text.ids):,} symbols of text, {len(text.symbols)} different ones; {size}")
    with progress.shown("training on tpu", size.steps, console) as task:
        model, on_device = train("tpu", size, text, task.advance)
    with progress.shown("the same training on cpu, until the time is up", console=console) as task:
        _, on_cpu = train("cpu", size, text, lambda n, note: task.advance(n, f"step {task.done + n}, {note}"), until)
    picture = output / "loss.png"
    try:
        draw({"tpu": on_device, "cpu": on_cpu}, picture)
    except OSError as error:
        console.print(f"[red]Can't write {picture}: {error.strerror}.[/red] Name another folder with --output.")
        return False
    difference = max(abs(a - b) for a, b in zip(on_device[:COMPARED], on_cpu[:COMPARED], strict=True))
    held = difference <= TOLERANCE and on_device[-1] < on_device[0]
    verdict = "[green]agree[/green]" if held else "[red]differ[/red]"
    console.print(f"loss curves in {picture}; the first {COMPARED} differ by at most {difference:.1e}: they {verdict}")
    began = time.perf_counter()
    with progress.shown("writing a sample", console=console):
        written = sample(model, size, text, PROMPT)
    each = (time.perf_counter() - began) / (len(written) - len(PROMPT))
    console.print(f"a sample, {each * 1e3:.0f} ms per symbol:")
    console.print(written, style="italic", markup=False, highlight=False)
    return held
