"""Takes an object away as a newer version of its library would, and puts it back: "torch._C:StorageBase.nbytes"."""

from __future__ import annotations

import contextlib
import sys


class Without:
    """Another object, but for one attribute."""

    def __init__(self, real, name):
        self._real, self._name = real, name

    def __getattr__(self, name):
        if name == self._name:
            raise AttributeError(f"{name} has been renamed")
        return getattr(self._real, name)


def _owner(where):
    module, names = where.split(":")
    *path, last = names.split(".")
    chain = [sys.modules[module]]
    for name in path:
        chain.append(getattr(chain[-1], name))
    return chain, path, last


def hide(where):
    """Takes the object away; returns the function that puts it back."""
    chain, path, last = _owner(where)
    owner = chain[-1]
    raw = vars(owner).get(last) if hasattr(owner, "__dict__") else None
    with contextlib.suppress(AttributeError, TypeError):
        delattr(owner, last)
    if not hasattr(owner, last):
        return lambda: setattr(owner, last, raw)
    # It belongs to C, or comes back by itself: the object that has it is replaced.
    assert path, f"{where} can't be taken away"
    setattr(chain[-2], path[-1], Without(owner, last))
    return lambda: setattr(chain[-2], path[-1], owner)


@contextlib.contextmanager
def hidden(*places):
    """Without these objects inside the block."""
    back = [hide(where) for where in places]
    try:
        yield
    finally:
        for put_back in reversed(back):
            put_back()
