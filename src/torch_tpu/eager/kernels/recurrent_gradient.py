"""The gradient of a recurrent layer as operators that can themselves be differentiated, for second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

Tensor = torch.Tensor


def _lstm(x: Tensor, hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru(x: Tensor, hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), hidden.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return [(states[0] - n) * (x_z + h_z).sigmoid() + n]


STEPS: dict[str, Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x, hidden, states: [(x + hidden).tanh()],
    "rnn_relu": lambda x, hidden, states: [(x + hidden).relu()],
}


def _layer(tensors: Sequence[Any], mode: str, reverse: bool) -> list[Tensor]:
    """Output and last states of a layer, step by step."""
    x, h, c, w_ih, w_hh, b_ih, b_hh, lengths = tensors
    products = linear(x, w_ih, b_ih)
    states = [h] if c is None else [h, c]
    outputs: list[Tensor] = [h] * len(x)
    for step in reversed(range(len(x))) if reverse else range(len(x)):
        new = STEPS[mode](products[step], linear(states[0], w_hh, b_hh), states)
        if lengths is not None:
            active = (step < lengths)[:, None]
            new = [torch.where(active, n, old) for n, old in zip(new, states, strict=True)]
        states = new
        outputs[step] = states[0]
    return [torch.stack(outputs), *states]


def differentiable_gradient(
    incoming: Sequence[Tensor | None], tensors: Sequence[Tensor | None], mode: str, reverse: bool
) -> list[Any]:
    """The gradients of x, h, c and the weights, as functions of all that they depend on.

    Args:
        incoming: the gradients of the output, the last h and the last c.
        tensors: the layer's arguments; the last one, `lengths`, has no gradient.
    """
    results = _layer(tensors, mode, reverse)
    given = [(r, g) for r, g in zip(results, incoming, strict=False) if g is not None]
    wanted = [t for t in tensors[:7] if t is not None and t.requires_grad]
    found = iter(
        torch.autograd.grad([r for r, _ in given], wanted, [g for _, g in given], create_graph=True, allow_unused=True)
    )
    return [next(found) if t is not None and t.requires_grad else None for t in tensors[:7]]
