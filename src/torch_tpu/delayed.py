"""Modules that are imported when something of them is first used: most processes that find their programs on disk
never build one, and need neither MLIR nor the tracer.

    if TYPE_CHECKING:
        from torch_tpu.hlo import array as hlo
    else:
        hlo = delayed.module("torch_tpu.hlo.array", globals(), "hlo")
"""

from __future__ import annotations

import importlib
from typing import Any


class _Delayed:
    """Stands in for a module under its name in another one, until the first attribute is asked for.

    The module itself takes its place then, so later uses cost nothing. Threads that come at the same time wait for
    each other in Python's own lock of that module.
    """

    __slots__ = ("_alias", "_name", "_owner")

    def __init__(self, name: str, owner: dict[str, Any], alias: str) -> None:
        self._name = name
        self._owner = owner
        self._alias = alias

    def __getattr__(self, attribute: str) -> Any:
        found = importlib.import_module(self._name)
        self._owner[self._alias] = found
        return getattr(found, attribute)


def module(name: str, owner: dict[str, Any], alias: str) -> Any:
    """What the module `owner` (its `globals()`) calls `alias`: the module `name`, imported at its first use."""
    return _Delayed(name, owner, alias)
