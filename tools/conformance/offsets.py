"""The axis "offsets": tensors that are views of the same geometry at several places of their storages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_utils import noncontiguous_like

from tools.conformance import placement
from tools.conformance.subject import Subject, check_calls, with_leaves

OFFSETS = (5, 2, 9)
ROWS = (1, 3, 0)


def check(subject: Subject, sample: Any, strided: bool) -> None:
    """Calls with views at other places, each argument at another one.

    Args:
        strided: with views that leave elements out as well.
    """
    with subject.keeping_places():
        for form in subject.forms(sample):
            for kind, place, at in (
                ("in a longer storage", placement.in_storage, OFFSETS),
                ("in a stack", placement.in_row, ROWS),
            ):
                check_calls(form, list(_calls(subject, sample, kind, place, at)))
            if strided:
                spread = with_leaves(subject, sample, lambda leaves: map(_noncontiguous, leaves))
                check_calls(form, list(_calls(subject, spread, "with gaps", placement.in_storage, OFFSETS)))


def _calls(
    subject: Subject, sample: Any, kind: str, place: placement.CallSite, at: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    for turn in (0, 1, 2, 0):

        def moved(leaves: list[Any], turn: int = turn) -> Iterator[Any]:
            for i, leaf in enumerate(leaves):
                yield place(leaf, at[(i + turn) % len(at)]) if isinstance(leaf, torch.Tensor) else leaf

        yield f"views {kind} from {at[turn]}", with_leaves(subject, sample, moved)


def _noncontiguous(leaf: Any) -> Any:
    return noncontiguous_like(leaf) if isinstance(leaf, torch.Tensor) else leaf
