"""Which places of a growing graph are cut without keeping many temporaries at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

# How many times those of the place with the fewest may be there.
MOST = 1.5


def few(
    places: Sequence[int], operators: Sequence[Any], slots: Sequence[ref[Any] | None], base: int, negligible: int
) -> list[int]:
    """Of the places between operators, those before which hardly more bytes of temporaries are computed than need be.

    A temporary is a result that nobody refers to and no later operator reads. XLA may keep all of a program's at once:
    with the backward pass of a layer normalisation at both ends, a program needs two activations more than with one.

    Args:
        operators, slots, base: of a graph.
        negligible: so many bytes don't count.
    """
    last = {~w: n for n, (_, wires, *_) in enumerate(operators) for w in wires if w < 0}
    ends: list[tuple[int, int]] = []
    for n, (plan, _, _, first, _) in enumerate(operators[: places[-1]]):
        for slot, nbytes in enumerate(plan.sizes, first):
            result = slots[slot - base]
            if result is None or result() is None:
                ends.append((max(last.get(slot, n), n), nbytes))
    held = {place: sum(nbytes for end, nbytes in ends if end < place) for place in places}
    most = MOST * max(min(held.values()), negligible)
    return [place for place in places if held[place] <= most]
