"""A table that forgets what has not been used for long."""

from __future__ import annotations

from typing import Any


class Recent(dict[Any, Any]):
    """A dict of what was used lately, at most `most` // 2 entries, before `older` things, as many again.

    An approximation of "least recently used" that costs a hit nothing: `get` is the dict's own. What it does not find,
    `find` may, which then counts as used. When the dict is full, it becomes `older`, and what was there is forgotten.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.older: dict[Any, Any] = {}

    def find(self, key: Any) -> Any:
        """The entry of a key, None if there is none."""
        found = self.get(key)
        if found is None:
            found = self.older.get(key)
            if found is not None:
                self.keep(key, found)
        return found

    def keep(self, key: Any, entry: Any) -> Any:
        """Adds an entry and returns it."""
        if len(self) >= self.most // 2:
            self.older = dict(self)
            super().clear()
        self[key] = entry
        return entry

    def replace(self, entry: Any, by: Any) -> None:
        """Puts another entry in the place of one, wherever that stands."""
        for table in (self, self.older):
            table.update([(key, by) for key, found in list(table.items()) if found is entry])

    def clear(self) -> None:
        super().clear()
        self.older = {}
