"""The models of `training.py`, each as a function that makes one training step in PyTorch; the GPT in JAX as well."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Width, heads, sequence length, batch, vocabulary of the GPT.
WIDTH, HEADS, LENGTH, BATCH, WORDS = 256, 8, 128, 8, 256
RATE, DECAY = 3e-4, 0.01


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(WIDTH, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A language model over bytes; `forward` is its loss."""

    def __init__(self, layers=6):
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x, target):
        hidden = self.word(x) + self.position(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), target.flatten())


class Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv_1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        hidden = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(hidden)) + self.shortcut(x))


class CNN(nn.Module):
    """A residual network for 32×32 images in three stages; `forward` is its loss."""

    def __init__(self, layers=2):
        super().__init__()
        widths = [16, *(w for w in (16, 32, 64) for _ in range(layers))]
        pairs = itertools.pairwise(widths)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(a, b, 1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(64, 10)

    def forward(self, x, target):
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), target)


class LSTM(nn.Module):
    """A recurrent language model; `forward` is its loss."""

    def __init__(self, layers=2):
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, layers, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x, target):
        return F.cross_entropy(self.head(self.recurrent(self.word(x))[0]).flatten(0, 1), target.flatten())


def sentences(length):
    """Random words, and the words behind them."""
    words = torch.randint(0, WORDS, (BATCH, length + 1), generator=torch.Generator().manual_seed(1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, 32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def step_of(name: str, device: str, layers: int | None = None, compiled: bool = False) -> Callable[[], float]:
    """A function that does one training step and returns the loss."""
    torch.manual_seed(0)
    make, data = {"gpt": (GPT, sentences(LENGTH)), "cnn": (CNN, images()), "lstm": (LSTM, sentences(64))}[name]
    model = (make() if layers is None else make(layers)).to(device)
    x, y = (t.to(device) for t in data)
    if name == "cnn":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=device != "cpu")
    loss_of = torch.compile(model) if compiled else model

    def step() -> float:
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def jax_step_of(layers: int | None = None) -> Callable[[], float]:
    """The GPT's step in JAX, jitted, its state donated."""
    import jax
    import jax.numpy as jnp

    model = GPT() if layers is None else GPT(layers)

    def pair(module):
        weight = module.weight.detach().numpy()
        return jnp.asarray(weight.T if weight.ndim == 2 else weight), jnp.asarray(module.bias.detach().numpy())

    names = ("norm_1", "qkv", "out", "norm_2", "up", "down")
    parameters = {
        "word": jnp.asarray(model.word.weight.detach().numpy()),
        "position": jnp.asarray(model.position.weight.detach().numpy()),
        "blocks": [{name: pair(getattr(block, name)) for name in names} for block in model.blocks],
        "norm": pair(model.norm),
        "head": pair(model.head),
    }

    def linear(x, p):
        return x @ p[0] + p[1]

    def norm(x, p):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[0] + p[1]

    def loss_of(p, x, y):
        hidden = p["word"][x] + p["position"]
        visible = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        for block in p["blocks"]:
            parts = jnp.split(linear(norm(hidden, block["norm_1"]), block["qkv"]), 3, -1)
            q, k, v = (t.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for t in parts)
            scores = jnp.where(visible, q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS), -jnp.inf)
            attended = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)
            hidden = hidden + linear(attended, block["out"])
            hidden = hidden + linear(jax.nn.gelu(linear(norm(hidden, block["norm_2"]), block["up"])), block["down"])
        logarithms = jax.nn.log_softmax(linear(norm(hidden, p["norm"]), p["head"]))
        return -jnp.take_along_axis(logarithms, y[..., None], -1).mean()

    def update(p, first, second, t, x, y):
        loss, gradient = jax.value_and_grad(loss_of)(p, x, y)
        each = jax.tree.map
        first = each(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = each(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)

        def moved(w, m, v):
            return w * (1 - RATE * DECAY) - RATE * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

        return loss, each(moved, p, first, second), first, second

    x, y = (jnp.asarray(t.numpy()) for t in sentences(LENGTH))
    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    state = [parameters, jax.tree.map(jnp.zeros_like, parameters), jax.tree.map(jnp.zeros_like, parameters)]
    steps = iter(range(1, 1 << 30))

    def step() -> float:
        loss, *state[:] = jitted(*state, float(next(steps)), x, y)
        return float(loss)

    return step
