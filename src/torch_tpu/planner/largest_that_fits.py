"""The largest number at which a plan fits, found with few plans: memory grows nearly in proportion to a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A name in the script's arguments, and the numbers that may stand for it."""

    name: str
    least: int
    most: int
    step: int = 1


def parse(text: str) -> Range:
    """`batch=1:512`, or `batch=8:512:8` for multiples.

    Raises:
        ValueError: where it is something else.
    """
    name, _, numbers = text.partition("=")
    parts = numbers.split(":")
    if not name.isidentifier() or len(parts) not in (2, 3) or not all(p.isdigit() for p in parts):
        raise ValueError(f"{text!r} is not a range. Write batch=1:512, or batch=8:512:8 for every eighth number.")
    found = Range(name, *(int(p) for p in parts))
    if not 0 < found.least <= found.most or not found.step:
        raise ValueError(f"{text!r} is an empty range. Write the smallest number first, at least 1.")
    return found


def substitute(arguments: list[str], name: str, number: int) -> list[str]:
    """The arguments with the number in place of `{name}`.

    Raises:
        ValueError: where no argument has that.
    """
    place = f"{{{name}}}"
    if not any(place in a for a in arguments):
        raise ValueError(
            f"No argument of the script contains {place}, so every plan would be the same. Write it where the number "
            f"belongs, for example --batch {place}."
        )
    return [a.replace(place, str(number)) for a in arguments]


def largest(numbers: Range, probe: Callable[[int], tuple[bool, int, int]]) -> int | None:
    """The largest number of the range that fits, where the next one does not; None where not even the least fits.

    Args:
        probe: for a number: whether it fits, the bytes it needs (0: unknown) and the limit.
    """
    count = (numbers.most - numbers.least) // numbers.step
    low, high = -1, count + 1  # fits; does not fit
    known: dict[int, int] = {}
    limit = 0

    def at(k: int) -> bool:
        fits, needs, bound = probe(numbers.least + k * numbers.step)
        nonlocal limit
        limit = bound
        if needs:
            known[k] = needs
        return fits

    tried = 0
    while high - low > 1:
        k = 0 if not tried else _guess(known, limit, low, high, tried)
        tried += 1
        if at(k):
            low = k
        else:
            high = k
            if k == 0:
                return None
    return numbers.least + low * numbers.step


def _guess(known: dict[int, int], limit: int, low: int, high: int, tried: int) -> int:
    """Where a line through the two nearest known needs meets the limit; every third time the middle."""
    middle = (low + high) // 2
    if tried == 1:
        return min(max(low + 1, low * 2), high - 1)
    near = sorted(known, key=lambda k: abs(known[k] - limit))[:2]
    if tried % 3 == 0 or len(near) < 2 or known[near[0]] == known[near[1]]:
        return middle
    a, b = near
    slope = (known[b] - known[a]) / (b - a)
    met = a + (limit - known[a]) / slope if slope > 0 else middle
    return min(max(int(met), low + 1), high - 1)
