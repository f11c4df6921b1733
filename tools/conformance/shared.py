"""The axis "shared": arguments that share a storage, after calls in which they did not, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch

from tools.conformance import placement
from tools.conformance.subject import Form, Subject, check_calls, leaves_of, with_leaves
from torch_tpu import hooks

MOST_PAIRS = 3


def check(subject: Subject, sample: Any) -> None:
    """For a few pairs of tensors: apart, the same tensor, views of one storage; in both orders."""
    forms = subject.forms(sample)
    with subject.keeping_places():
        for i, j in _pairs(leaves_of(subject, sample)):
            for form in forms:
                together = [(f"arguments {i} and {j} {how}", s) for how, s in _together(subject, sample, i, j, form)]
                together = [(how, s) for how, s in together if form.is_defined is None or form.is_defined(s)]
                if not together:
                    continue
                apart = (f"arguments {i} and {j} apart", sample)
                check_calls(form, [apart, *together, apart])
                hooks.forget_programs()
                for call in together:
                    check_calls(form, [call, apart])
                    hooks.forget_programs()


def _pairs(leaves: list[Any]) -> list[tuple[int, int]]:
    def fits(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel() > 0

    at = [i for i, leaf in enumerate(leaves) if fits(leaf)]
    pairs = [(i, j) for i, j in combinations(at, 2) if leaves[i].dtype is leaves[j].dtype]
    return pairs[:MOST_PAIRS]


def _together(subject: Subject, sample: Any, i: int, j: int, form: Form) -> Iterator[tuple[str, Any]]:
    leaves = leaves_of(subject, sample)
    first, second = leaves[i], leaves[j]
    if first.shape == second.shape:
        # The second may be written by a form in place, so each form is given its own.
        yield "the same tensor", _replaced(subject, sample, {j: first})
    after = placement.span_of(first) + 1
    one, other = placement.in_one_storage(first, second, after)
    yield "in one storage", _replaced(subject, sample, {i: one, j: other})
    if not form.writes and after > 2:
        one, other = placement.in_one_storage(first, second, 1)
        yield "overlapping", _replaced(subject, sample, {i: one, j: other})


def _replaced(subject: Subject, sample: Any, new: dict[int, torch.Tensor]) -> Any:
    return with_leaves(subject, sample, lambda leaves: [new.get(i, leaf) for i, leaf in enumerate(leaves)])
