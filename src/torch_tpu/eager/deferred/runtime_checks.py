"""Conditions of recorded operators (an index in bounds), which nobody looks at before their program has run.

Where one does not hold, the call raises late, in the thread that made it, and what it was to write has kept its value.
Autograd's version counter moved when the call returned; on the CPU it does not, so it is set back.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from torch_tpu import hooks
from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.tensor import transfer
from torch_tpu.tensor.storage import Content

_set_versions = torch._C._autograd._unsafe_set_version_counter


class Write:
    """Tensors that a call with conditions writes, with their versions before it."""

    __slots__ = ("_versions",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # A view shares the counter of its base, and lives no longer than the call where it is written as `x[0] //= y`.
        written = [t if t._base is None else t._base for t in tensors if not t.is_inference()]
        self._versions = [(weakref.ref(t), t._version) for t in written]

    def undo(self) -> None:
        """Takes back that it was counted, unless the call did not get so far."""
        for reference, version in self._versions:
            t = reference()
            if t is not None and t._version > version:
                _set_versions((t,), (t._version - 1,))
        self._versions = []


class Owner:
    """Stands for a thread; gone when the thread is."""

    __slots__ = ("__weakref__",)


_this_thread = threading.local()


def owner() -> weakref.ref[Owner]:
    """Of the thread that calls."""
    try:
        found: Owner = _this_thread.owner
    except AttributeError:
        found = _this_thread.owner = Owner()
    return weakref.ref(found)


class Condition(NamedTuple):
    """A condition that a recorded operator states, and what to raise where it does not hold.

    Attributes:
        shown: what stands for {} in the message.
        operator, place: what stated it, and where in the user's program.
        write: what does not happen then.
        owner: the thread that recorded it.
    """

    holds: Content
    message: str
    error: type[Exception]
    shown: Content | None
    operator: str
    place: CallSite
    write: Write | None
    owner: weakref.ref[Owner]


unread: deque[Condition] = deque()


def settle(most: int = 0) -> None:
    """Looks at the conditions of programs that have run, until at most so many are left; waits for those programs.

    Only those of this thread, and of threads that have ended.

    Raises:
        The error of the first that does not hold, or of the program that should have computed it. The others are then
        forgotten: they may follow from it.
    """
    own = owner()
    ready = [c for c in list(unread) if c.holds.graph is None and (c.owner == own or c.owner() is None)]
    for n, condition in enumerate(ready[: max(len(ready) - most, 0)]):
        if not _take(condition):
            continue
        try:
            holds = _holds(condition)
        except RuntimeError:
            _drop(ready[n + 1 :])
            raise
        if not holds:
            _drop(ready[n + 1 :])
            shown = condition.shown
            text = condition.message if shown is None else condition.message.format(transfer.contents(shown.array))
            raise condition.error(f"{text} (in {condition.operator}, called at {user_lines.where(condition.place)})")


def _drop(conditions: Iterable[Condition]) -> None:
    """Takes conditions without an error; writes of those that do not hold are taken back."""
    for condition in conditions:
        if _take(condition) and condition.write is not None:
            with contextlib.suppress(RuntimeError):  # never computed
                _holds(condition)


def _holds(condition: Condition) -> bool:
    holds = transfer.is_true(condition.holds.array)
    if not holds and condition.write is not None:
        condition.write.undo()
    return holds


def _take(condition: Condition) -> bool:
    """Whether it was still unread: another thread may look at the same time."""
    try:
        unread.remove(condition)
    except ValueError:
        return False
    return True


def forget(which: Callable[[Content], bool]) -> None:
    """Drops conditions, by the value that says whether one holds."""
    for condition in list(unread):
        if which(condition.holds):
            _take(condition)


hooks.before_reading = settle
