"""Which sizes there are programs for."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

SMALLEST = 8


class Policy:
    """The sizes that a dimension is padded to.

    Args:
        option: what the user gave as `options={"buckets": …}`. True: 8, 16, 32 and so on; a float: from 8 on each is
            this many times the one before, rounded up to a multiple of 8; a sequence: these, and larger ones are not
            padded.

    Raises:
        ValueError: for anything else.
    """

    def __init__(self, option: Any) -> None:
        self._growth = 0.0
        self._sizes: list[int] = [SMALLEST]
        if option is True:
            self._growth = 2.0
        elif isinstance(option, float) and math.isfinite(option) and option > 1:
            self._growth = option
        elif isinstance(option, Sequence) and not isinstance(option, str) and option and all(map(_is_size, option)):
            self._sizes = sorted(set(option))
        else:
            raise ValueError(
                f"option 'buckets' of torch.compile is {option!r}: expected True, a float above 1 (the factor from "
                "one bucket to the next), or a list of sizes, each at least 2"
            )

    def round_up(self, size: int) -> int | None:
        """The smallest bucket that holds `size`; None if there is none, or if a program for it alone is better."""
        if size < 2:
            # Dimensions of 1 broadcast and those of 0 have no elements: they are no shorter forms of longer ones.
            return None
        while self._growth and self._sizes[-1] < size:
            grown = math.ceil(self._sizes[-1] * self._growth)
            self._sizes.append(-(-grown // SMALLEST) * SMALLEST)
        place = bisect.bisect_left(self._sizes, size)
        return self._sizes[place] if place < len(self._sizes) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2
