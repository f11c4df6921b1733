"""A table that keeps the entries put last, so that it does not grow with what a program does."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """A dict of at most `most` entries. Where there would be more, the one that was put longest ago leaves."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, entry: V) -> V:
        """Puts an entry, also one that is there, behind all others and returns it."""
        self[key] = entry
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)
        return entry
