"""A small language model, and training it: alone, and over processes in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 32, 16, 2, 8, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # fewer heads where they are spread over ranks
            for p in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        # Used on some ranks and in some steps only.
        self.extra = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, ids: torch.Tensor, with_extra: bool = False) -> torch.Tensor:
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        if self.extra is not None and with_extra:
            x = x + self.extra(x)
        return self.head(self.norm(x))


def gpt(unused: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(unused)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[..., torch.Tensor], ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1], **options).flatten(0, 1), ids[:, 1:].flatten())


def train(
    model: Any,
    device: str,
    steps: int,
    share: tuple[int, int] = (0, 1),
    options: Callable[[int], dict[str, Any]] = lambda step: {},
    clip: float | None = None,
) -> list[float]:
    """Losses, over all ranks where `share` says which part of a batch this one has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, size = share
    losses = []
    for step in range(steps):
        ids = batch(step).chunk(size)[rank].to(device)
        loss = loss_of(model, ids, **options(step))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        loss = loss.detach().clone()
        if size > 1:
            dist.all_reduce(loss)
            loss /= size
        losses.append(loss.item())
    return losses
