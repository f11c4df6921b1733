"""The table that forgets what has not been used for long: of plans, buffers, verdicts and what the report lists."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict of what was used lately, at most `most` // 2 entries, before `older` things, as many again.

    An approximation of "least recently used" that costs a hit nothing: `get` is the dict's own. What it does not find,
    `find` may, which then counts as used. When the dict is full, it becomes `older`, and what was there is forgotten.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.older: dict[K, V] = {}

    def find(self, key: K) -> V | None:
        """The entry of a key, None if there is none."""
        found = self.get(key)
        if found is None:
            found = self.older.get(key)
            if found is not None:
                self.keep(key, found)
        return found

    def keep(self, key: K, entry: V) -> V:
        """Adds an entry and returns it."""
        if len(self) >= self.most // 2:
            self.older = dict(self)
            super().clear()
        self[key] = entry
        return entry

    def replace(self, entry: V, by: V) -> None:
        """Puts another entry in the place of one, wherever that stands."""
        for table in (self, self.older):
            table.update([(key, by) for key, found in list(table.items()) if found is entry])

    def forget(self, key: K) -> None:
        """Drops an entry, if there is one."""
        self.pop(key, None)
        self.older.pop(key, None)

    def entries(self) -> list[V]:
        """All there are, those kept last at the end."""
        return [*(entry for key, entry in self.older.items() if key not in self), *self.values()]

    def clear(self) -> None:
        super().clear()
        self.older = {}
