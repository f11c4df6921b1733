"""What happened at which line of the user's program: waits for the device, flushes of fused mode, what the CPU ran."""

from __future__ import annotations

import dis
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch_tpu.metrics import counts, user_lines
from torch_tpu.metrics.user_lines import CallSite

# Lines remembered; what happens at others is counted as "elsewhere".
MOST_PLACES = 4096


@dataclass(frozen=True)
class Line:
    """How often something happened at one line. `line` is `file:line`, `source` the text there."""

    what: str
    detail: str
    line: str
    source: str
    count: int


class _Entry:
    __slots__ = ("count", "detail", "place")

    def __init__(self, place: CallSite, detail: str) -> None:
        self.count = 0
        self.place = place
        self.detail = detail


# By kind, what happened, and place. An entry keeps its place's code alive, so ids stay.
_entries: dict[tuple[str, str, int, int], _Entry] = {}


def note(kind: str, what: str, detail: str = "", place: CallSite = None) -> None:
    """Counts an event as `<kind>::<what>`, and at a place of the user's program.

    Args:
        kind: "sync", "flush", "fallback" or "hosted".
        place: the one that is running now if not given.
    """
    counts.counters[f"{kind}::{what}"] += 1
    place = place or user_lines.here_or_backward()
    code, instruction = place or (None, 0)
    key = (kind, what, id(code), instruction)
    entry = _entries.get(key)
    if entry is None:
        if len(_entries) >= MOST_PLACES:
            key, place = (kind, what, 0, 0), None
        entry = _entries.setdefault(key, _Entry(place, detail))
    entry.count += 1


class _Waiting(threading.local):
    what: str | None = None


_waiting = _Waiting()


class waiting:
    """Around what makes the host wait for the device: counts it as a sync point, unless another one surrounds it."""

    __slots__ = ("outer", "what")

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        self.outer = _waiting.what
        if self.outer is None:
            note("sync", self.what)
            _waiting.what = self.what

    def __exit__(self, *exc_info: object) -> None:
        _waiting.what = self.outer


def waited_for() -> str | None:
    """What this thread waits for, where that is known."""
    return _waiting.what


def lines(kind: str) -> list[Line]:
    """Every event of a kind by line, most frequent first."""
    found: dict[tuple[str, str, str], tuple[int, CallSite]] = {}
    for (its_kind, what, *_), entry in list(_entries.items()):
        if its_kind == kind:
            what = "bool" if what == "item" and _decides(entry.place) else what
            key = (what, entry.detail, user_lines.where(entry.place))
            count, _ = found.get(key, (0, None))
            found[key] = (count + entry.count, entry.place)
    return sorted(_sorted_lines(found), key=lambda event: -event.count)


def _sorted_lines(found: dict[tuple[str, str, str], tuple[int, CallSite]]) -> Iterator[Line]:
    for (what, detail, line), (count, place) in sorted(found.items()):
        yield Line(what, detail, line, user_lines.source_of(place), count)


def _decides(place: CallSite) -> bool:
    """Whether the instruction at a place asks a value for its truth: `if x`, `not x`, `x and y`."""
    if place is None:
        return False
    code, offset = place
    name = next((i.opname for i in dis.get_instructions(code) if i.offset == offset), "")
    return name.startswith(("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL"))


def reset() -> None:
    _entries.clear()
