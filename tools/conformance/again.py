"""The axis "again": the same program with other data, then with the first data once more."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tools.conformance.subject import Subject, check_calls, with_leaves


def check(subject: Subject, sample: Any, other: Any | None) -> None:
    """Calls with the sample, with others of the same shapes, dtypes and strides, and with the sample again.

    Args:
        other: the sample in its place where the database draws once more.
    """
    second = other if other is not None and alike(subject, sample, other) else turned(subject, sample)
    for form in subject.forms(sample):
        check_calls(form, [("first data", sample), ("other data", second), ("first data again", sample)])


def alike(subject: Subject, sample: Any, other: Any) -> bool:
    """Whether two samples differ in nothing but the values of tensors, and in those of one at least."""
    leaves, spec = tree_flatten(subject.arguments(sample))
    others, other_spec = tree_flatten(subject.arguments(other))
    if spec != other_spec:
        return False
    pairs = list(zip(leaves, others, strict=True))
    return all(_same_kind(a, b) for a, b in pairs) and any(_differ(a, b) for a, b in pairs)


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        described = [
            (t.shape, t.dtype, t.layout, t.stride() if t.layout is torch.strided else (), t.requires_grad)
            for t in (a, b)
            if isinstance(t, torch.Tensor)
        ]
        return len(described) == 2 and described[0] == described[1]
    return type(a) is type(b) and (callable(a) or bool(a == b) or (a != a and b != b))


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and not torch.equal(a.detach(), b.detach())


def turned(subject: Subject, sample: Any) -> Any:
    """The sample with the elements of each tensor in reverse order: what was a valid index is one again."""

    def turn(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
            return t
        values = t.detach().flip(tuple(range(t.dim())))
        if 0 in t.stride():
            return values.requires_grad_(t.requires_grad)
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        return made.copy_(values).requires_grad_(t.requires_grad)

    return with_leaves(subject, sample, lambda leaves: map(turn, leaves))
