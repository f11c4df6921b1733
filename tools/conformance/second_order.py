"""Double backward: the gradients of gradients, on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tools.compare import Mismatch, NoGradient, assert_same


def check_second_order(
    call: Callable[[Any], Any], device: Any, host: Any, rtol: float | None = None, atol: float | None = None
) -> None:
    """The second derivatives of `call(inputs)` by the inputs and by what the first backward pass starts from.

    Raises:
        NoGradient: where PyTorch has none on the CPU.
    """
    try:
        want = second_gradients(call(host), host)
    except Exception as error:
        raise NoGradient(str(error)) from error
    got = second_gradients(call(device), device)
    for g, w in zip(got, want, strict=True):
        if (g is None) != (w is None):
            raise Mismatch("structure", f"the second-order gradient is {g}, on the CPU {w}")
        if w is not None:
            assert_same(g, w, strides=False, rtol=rtol, atol=atol)


def second_gradients(results: Any, arguments: Any) -> list[torch.Tensor | None]:
    leaves = [t for t in _differentiable(arguments) if t.is_leaf]
    roots = [t for t in _differentiable(results) if t.grad_fn is not None]
    if not leaves or not roots:
        return []
    seeds = [s.requires_grad_() for s in _like(roots, 7)]
    first = torch.autograd.grad(roots, leaves, seeds, create_graph=True, allow_unused=True)
    first = [g for g in first if g is not None and g.grad_fn is not None]
    if not first:
        return []
    return list(torch.autograd.grad(first, [*leaves, *seeds], _like(first, 11), allow_unused=True))


def _like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The same random numbers for every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype).to(t.device) for t in tensors]


def _differentiable(nest: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(nest) if isinstance(t, torch.Tensor) and t.requires_grad]
