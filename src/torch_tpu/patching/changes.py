"""The changes that one patch makes: each can be taken back, so that a patch is made whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from torch_tpu.patching.needs import MARK


class Changes:
    """What a patch has changed, in order.

    Attributes:
        module: the module after whose import the patch is made; None for other patches.
    """

    def __init__(self, name: str, after: str = "") -> None:
        self.module: Any = sys.modules.get(after)
        self._name = name
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, where the owner is a module, a class or a function."""
        own = vars(owner)
        if name in own:
            # What stands in the class: `getattr` would give the function of a static method.
            self._undo.append(functools.partial(setattr, owner, name, own[name]))
        elif not isinstance(owner, type) and hasattr(type(owner), name):
            self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, self._marked(value))

    def put(self, table: MutableMapping[Any, Any], key: object, value: Any) -> None:
        """`table[key] = value`."""
        if key in table:
            self._undo.append(functools.partial(table.__setitem__, key, table[key]))
        else:
            self._undo.append(functools.partial(table.pop, key, None))
        table[key] = self._marked(value)

    def append(self, items: list[Any], value: Any) -> None:
        """`items.append(value)`."""
        items.append(value)
        self._undo.append(lambda: items.remove(value))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Says what takes back a change that was made otherwise."""
        self._undo.append(action)

    def undo(self) -> None:
        """Takes everything back, the last first."""
        while self._undo:
            self._undo.pop()()

    def _marked(self, value: Any) -> Any:
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        # Objects of C and numbers take no attributes; nothing asks them.
        with contextlib.suppress(AttributeError, TypeError):
            setattr(inner, MARK, self._name)
        return value
