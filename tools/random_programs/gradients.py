"""Steps of autograd: backward passes, gradients of gradients, hooks, retained and accumulated gradients."""

from __future__ import annotations

import torch

from tools.random_programs.draft import Draft, NoChoice, is_inexact
from tools.random_programs.kinds import kind


def _loss(draft: Draft, x: str) -> str:
    """A real number that depends on a tensor."""
    t = draft[x]
    if t.is_complex():
        return draft.choice([f"torch.view_as_real({x}.resolve_conj()).sum()", f"({x} * {x}.conj()).real.sum()"])
    return draft.choice([f"{x}.sum()", f"({x} * {x}).sum()", f"{x}.mean()", f"({x} * 2).sum()"])


def _differentiable(t: torch.Tensor) -> bool:
    return t.requires_grad and not t.is_leaf


@kind(9)
def backward(draft: Draft) -> str:
    x = draft.pick(_differentiable)
    retain = draft.choice(["", "retain_graph=True", "retain_graph=True"])
    if draft.chance(0.3):
        return f"{x}.backward(torch.ones_like({x}){', ' if retain else ''}{retain})"
    return f"{_loss(draft, x)}.backward({retain})"


@kind(5)
def grad(draft: Draft) -> str:
    x = draft.pick(_differentiable)
    y = draft.pick(lambda t: t.requires_grad and t.is_leaf)
    create = draft.choice(["", ", retain_graph=True", ", create_graph=True"])
    return f"{draft.new()}, = torch.autograd.grad({_loss(draft, x)}, {y}{create})"


@kind(2, exact=True)
def retain_grad(draft: Draft) -> str:
    return f"{draft.pick(_differentiable)}.retain_grad()"


@kind(3)
def hook(draft: Draft) -> str:
    x = draft.pick(_differentiable)
    # One of several results gets no gradient where only the others have one. An exception would end the process: the
    # engine's C++ guard calls Python while it is pending.
    changed = draft.choice(["g * 2", "g + g", "g.clone()", "None"])
    return f"{x}.register_hook(lambda g: {changed} if g is not None else g)"


@kind(6, exact=True)
def change_grad(draft: Draft) -> str:
    x = draft.pick(lambda t: t.is_leaf and t.grad is not None)
    return draft.choice(
        [f"{x}.grad = None", f"{x}.grad.zero_()", f"{draft.new()} = {x}.grad", f"{draft.new()} = {x}.grad.t()"]
        if draft[x].dim() == 2
        else [f"{x}.grad = None", f"{x}.grad.zero_()", f"{draft.new()} = {x}.grad"]
    )


@kind(8)
def step(draft: Draft) -> str:
    """An update of a leaf by its gradient, as an optimizer makes it."""
    x = draft.pick(lambda t: t.is_leaf and t.grad is not None)
    return draft.choice(
        [
            f"{x}.data.add_({x}.grad, alpha=-0.5)",
            f"with torch.no_grad(): {x} -= {x}.grad * 0.25",
            f"torch.optim.SGD([{x}], lr=0.5, momentum=0.9).step()",
        ]
    )


@kind(exact=True)
def require_grad(draft: Draft) -> str:
    x = draft.pick(is_inexact, lambda t: t.is_leaf)
    return f"{x}.requires_grad_({draft.choice(['', 'False', ''])})"


@kind(3)
def differentiable(draft: Draft) -> str:
    """A smooth function of a tensor that requires a gradient, so that later steps find one."""
    x = draft.pick(lambda t: t.requires_grad and t.is_floating_point())
    if not draft[x].numel():
        raise NoChoice
    form = draft.choice(["{x}.sin()", "{x} * {x}", "torch.tanh({x})", "{x} * 0.5 + 1", "{x}.clone()", "{x}.exp()"])
    return f"{draft.new()} = {form.format(x=x)}"
