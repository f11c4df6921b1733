"""Every program that was made, and why no earlier one could be used.

A program is described by fields ("shape of self" → "[2, 3]"). One with a name that was met before is a recompile; its
reason are the fields in which it differs from the most similar earlier one of that name.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_tpu.metrics import counts, user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.recent import Recent

Fields = Mapping[str, str]

# Programs kept in the log; earlier programs that a new one is compared with, for each name.
MOST_LOGGED = 4096
MOST_COMPARED = 64
# Names (operators and graphs) and operator programs that later reasons can refer to.
MOST_NAMES = 4096
MOST_PLANS = 16384
# Graphs listed, with so many programs each, and places at which Dynamo could not go on.
MOST_GRAPHS = 1024
MOST_OF_GRAPH = 256
MOST_BREAKS = 1024
# Differences named in a reason.
MOST_NAMED = 3


@dataclass(frozen=True)
class Made:
    """A program that was made.

    Attributes:
        kind: "operator", "graph" (of torch.compile), "fused" (operators of fused eager).
        reason: what differs from the nearest earlier one; empty for the first of its name.
        place: the user's line that needed it.
        after: how many programs had run before.
    """

    kind: str
    name: str
    reason: str
    place: CallSite
    after: int


@dataclass
class CapturedGraph:
    """A graph that torch.compile captured.

    Attributes:
        reason: why Dynamo captured it again, in its words; empty the first time.
        refused: why no program can express it; `by_operator` is how often it ran operator by operator, `in_pieces` how
            often as programs around what is not possible.
        layers: how many equal layers share a program, one of `parts`; 0 where all is one program.
        is_padded: sizes that vary are to be rounded up; `unpadded` is why it has a program for each shape nevertheless.
    """

    name: str
    reason: str
    place: CallSite
    refused: str = ""
    by_operator: int = 0
    in_pieces: int = 0
    layers: int = 0
    parts: int = 1
    unpadded: str = ""
    is_padded: bool = False
    made: deque[Made] = field(default_factory=lambda: deque(maxlen=MOST_OF_GRAPH))


@dataclass(frozen=True)
class Break:
    """Where Dynamo could not go on with a graph, and why, in its words."""

    what: str
    detail: str
    line: str
    source: str


log: deque[Made] = deque(maxlen=MOST_LOGGED)
# Those that were captured, or had a program made or ran otherwise, since the reset.
graphs: Recent[str, CapturedGraph] = Recent(MOST_GRAPHS)
breaks: Counter[Break] = Counter()
# What is known of what was made before a reset: each graph as it was captured,
_captured: Recent[str, CapturedGraph] = Recent(MOST_GRAPHS)
# the programs of each name,
_earlier: Recent[str, deque[Fields]] = Recent(MOST_NAMES)
# the operator program of each plan number, and the fused programs made so far as counts of plan numbers.
_of_plan: Recent[int, Made] = Recent(MOST_PLANS)
_fused: deque[tuple[Counter[int], tuple[int, ...], int]] = deque(maxlen=MOST_COMPARED)
_in_fused: Recent[int, bool] = Recent(MOST_PLANS)


def made(kind: str, name: str, fields: Fields, plan: int) -> None:
    """Logs a program of one operator or graph.

    Args:
        plan: its plan's number, by which fused programs name it.
    """
    earlier = _earlier.find(name) or _earlier.keep(name, deque(maxlen=MOST_COMPARED))
    reason = _difference(fields, earlier) if earlier else ""
    earlier.append(fields)
    entry = _of_plan.keep(plan, _logged(kind, name, reason))
    for known in (name, name.rpartition(", ")[0]):  # a piece is named "graph, piece"
        if graphs.find(known) or _captured.find(known):
            _graph(known).made.append(entry)
            break


def _logged(kind: str, name: str, reason: str) -> Made:
    entry = Made(kind, name, reason, user_lines.here_or_backward(), counts.counters["execute"])
    log.append(entry)
    return entry


def _difference(fields: Fields, earlier: Sequence[Fields] | deque[Fields]) -> str:
    """How fields differ from the nearest of earlier ones, the latest of those."""

    def differing(other: Fields) -> list[str]:
        return [name for name in {**other, **fields} if other.get(name) != fields.get(name)]

    nearest = min(reversed(earlier), key=lambda other: len(differing(other)))
    changes = [f"{name}: {nearest.get(name, '-')} → {fields.get(name, '-')}" for name in differing(nearest)]
    return _some(changes) or "another layout of the same tensors in memory"


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def fused(plans: Sequence[int], names: Sequence[str], outputs: int) -> None:
    """Logs a program of fused eager, made of the operator programs with these numbers and names."""
    count = Counter(plans)
    reason = _why_fused(plans, dict(zip(plans, names, strict=True)), count, outputs) if _fused else ""
    _fused.append((count, tuple(plans), outputs))
    for number in count:
        _in_fused.keep(number, True)
    _logged("fused", f"{len(plans)} operators", reason)


def _why_fused(plans: Sequence[int], names: Mapping[int, str], count: Counter[int], outputs: int) -> str:
    new = [number for number in count if not _in_fused.find(number)]
    if new:
        changed = [m for m in map(_of_plan.find, new) if m is not None and m.reason]
        if changed:
            return _some([f"{m.name} has another {m.reason} ({user_lines.where(m.place)})" for m in changed])
        return f"it contains new operators: {_some([names[n] for n in new])}"
    nearest, order, kept = min(reversed(_fused), key=lambda other: _distance(count, other[0]))
    if count != nearest:
        sides = (("more", count - nearest), ("fewer", nearest - count))
        parts = [f"{side.total()} {word} ({_some([_name(n) for n in side])})" for word, side in sides if side]
        return f"compared with the most similar program: {', '.join(parts)}"
    if order != tuple(plans):
        return "the same operators are in another order"
    return f"{outputs} results are kept, not {kept}" if outputs != kept else "operators read other results"


def _name(plan: int) -> str:
    found = _of_plan.find(plan)
    return "?" if found is None else found.name


def _distance(one: Counter[int], other: Counter[int]) -> int:
    return (one - other).total() + (other - one).total()


def _graph(name: str) -> CapturedGraph:
    """A graph of the list; one that was captured before the reset joins it again, without what it did then."""
    found = graphs.find(name)
    if found is None:
        known = _captured.find(name) or CapturedGraph(name, "", user_lines.here_or_backward())
        found = graphs.keep(name, replace(known, made=deque(maxlen=MOST_OF_GRAPH)))
    return found


def captured(name: str, reason: str, is_padded: bool = False) -> None:
    """Logs a graph that torch.compile captured; `is_padded` if sizes that vary are rounded up."""
    _captured.keep(name, CapturedGraph(name, reason, user_lines.here_or_backward(), is_padded=is_padded))
    graphs.forget(name)
    _graph(name)


def broken(reason: str, explanation: str, line: str, source: str) -> None:
    """Counts a captured graph that ends before its function does, at a line that could not be captured."""
    found = Break(reason, explanation, line, source)
    if found not in breaks and len(breaks) >= MOST_BREAKS:
        found = Break(reason, "", "other lines", "")
    breaks[found] += 1


def layered(name: str, layers: int, distinct: int) -> None:
    """Notes that a captured graph runs as so many different programs, one of them for all of its equal layers."""
    for graph in filter(None, (_captured.find(name), _graph(name))):
        graph.layers, graph.parts = layers, distinct


def ran_by_operator(name: str, reason: str) -> None:
    """Counts a run of a graph that no program can express."""
    _refused(name, reason).by_operator += 1


def ran_in_pieces(name: str, reason: str) -> None:
    """Counts a run of a graph as programs around something that none can express."""
    _refused(name, reason).in_pieces += 1


def specialised(name: str, reason: str) -> None:
    """Logs that padding a graph's sizes is not sound."""
    _graph(name).unpadded = reason


def _refused(name: str, reason: str) -> CapturedGraph:
    graph = _graph(name)
    graph.refused = reason
    return graph


def recompiles() -> list[Made]:
    """The programs that were not the first of their name, the latest first."""
    return [entry for entry in reversed(log) if entry.reason]


def reset() -> None:
    """Empties the lists. The latest of what was made before stays known, so that later recompiles have a reason."""
    log.clear()
    breaks.clear()
    graphs.clear()
