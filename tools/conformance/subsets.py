"""The axis "subsets": gradients where some of the inputs need none, and of one result alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from tools.conformance.subject import Form, Subject, check_calls, tensors_of, with_leaves

# So many inputs have every subset; of more, each alone, all but each, and a few others.
MOST_INPUTS = 4
MOST_OTHERS = 4
MOST_EACH = 8


def subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Which of `count` inputs need gradients, some of them at least; begins with all."""
    if count <= MOST_INPUTS:
        yield from (s for s in product((True, False), repeat=count) if any(s))
        return
    yield (True,) * count
    each = sorted({i * count // min(count, MOST_EACH) for i in range(MOST_EACH)})
    for wanted in (True, False):
        yield from (tuple((i == j) is wanted for j in range(count)) for i in each)
    chosen = random.Random(0)
    for _ in range(MOST_OTHERS):
        subset = tuple(chosen.random() < 0.5 for _ in range(count))
        if any(subset):
            yield subset


def check(subject: Subject, sample: Any, forms: Sequence[Form]) -> None:
    """Calls in which each subset of the tensors that need gradients does, and in which all do once more."""
    leaves = [leaf for leaf in tensors_of(subject, sample) if leaf.requires_grad]
    calls = [(f"gradients of {named(s)}", _needing(subject, sample, s)) for s in subsets(len(leaves))]
    for form in forms:
        check_calls(form, [*calls, *calls[:1]])


def _needing(subject: Subject, sample: Any, subset: tuple[bool, ...]) -> Any:
    def change(leaves: list[Any]) -> Iterator[Any]:
        needs = iter(subset)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                yield leaf.detach().requires_grad_(next(needs))
            else:
                yield leaf

    return with_leaves(subject, sample, change)


def named(subset: tuple[bool, ...]) -> str:
    return f"inputs {', '.join(str(i) for i, needs in enumerate(subset) if needs)}" if not all(subset) else "all inputs"
