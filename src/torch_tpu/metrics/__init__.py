"""Counts of what the backend did, and where in the user's program: `report()`, or `snapshot()` for a program to read.

Counters: `program` (a new one was traced), `compile` (XLA compiled it) or `disk_cache_hit` (it was on disk),
`trace_seconds`, `compile_seconds`, `disk_cache_seconds` (spent loading), `compile_cache_hit` (this process had it),
`disk_cache_read_error`, `disk_cache_write_error`, `disk_cache_refused` (others may write there),
`autograd_cache_refused` (the same of AOTAutograd's cache), `execute`, `graph_by_operator` (a compiled graph that no
program can express ran), `graph_cut` (one ran as programs around what none can express), `fallback::<operator>`,
`hosted::<operator>` (a small operator that has had many shapes ran on the host for one more), `sync::<what>`,
`host_to_device_bytes`, `device_to_host_bytes`; in fused mode `fused_program` and `flush::<cause>`. Of compiled graphs:
`repetition_outlined` (copies of equal parts that became calls of one function), `repetition_left_alone` (graphs whose
equal parts write to their inputs or return views of them).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch_tpu.metrics import counts, events, programs, user_lines
from torch_tpu.metrics.counts import add_seconds, count, timed
from torch_tpu.metrics.events import note, waited_for, waiting

__all__ = ["add_seconds", "count", "counters", "note", "report", "reset", "snapshot", "timed", "waited_for", "waiting"]


def counters() -> dict[str, int | float]:
    """Every counter that is not zero; `*_seconds` are wall time."""
    return counts.nonzero()


def reset() -> None:
    """Forgets all counts, events and graphs. The latest programs stay known, so that a later one still has a reason.

    A graph that was captured before is listed again when it gets another program, or runs without one.
    """
    counts.reset()
    events.reset()
    programs.reset()


def snapshot() -> dict[str, Any]:
    """Everything `report` tells, as plain dicts, lists, strings and numbers, which `json` can write.

    Keys: `counters`; `recompiles` (programs that were not the first of their operator or graph, the latest first, each
    with `kind`, `name`, `reason`, `line` and `after`, the number of programs that had run before); `graphs` (of
    torch.compile, with their programs; if `layers` is not 0, so many equal layers share one of `parts` programs);
    `graph_breaks` (where a captured graph ends before its function), `syncs`, `flushes`, `fallbacks`, `hosted`
    (small operators that have had many shapes, run by the host for more), each with `what`, `detail`, `line`, `source`
    and `count`, most frequent first.
    """
    return {
        "counters": counters(),
        "recompiles": [_made(m) for m in programs.recompiles()],
        "graphs": [_graph(g) for g in programs.graphs.entries()],
        "graph_breaks": [asdict(b) | {"count": count} for b, count in programs.breaks.most_common()],
        "syncs": _lines("sync"),
        "flushes": _lines("flush"),
        "fallbacks": _lines("fallback"),
        "hosted": _lines("hosted"),
    }


def _lines(kind: str) -> list[dict[str, Any]]:
    return [asdict(event) for event in events.lines(kind)]


def _made(program: programs.Made) -> dict[str, Any]:
    return {
        "kind": program.kind,
        "name": program.name,
        "reason": program.reason,
        "line": user_lines.where(program.place),
        "after": program.after,
    }


def _graph(graph: programs.CapturedGraph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "line": user_lines.where(graph.place),
        "reason": graph.reason,
        "refused": graph.refused,
        "by_operator": graph.by_operator,
        "in_pieces": graph.in_pieces,
        "is_padded": graph.is_padded,
        "unpadded": graph.unpadded,
        "layers": graph.layers,
        "parts": graph.parts,
        "programs": [_made(m) for m in graph.made],
    }


def report(most: int = 10) -> str:
    """The snapshot as text.

    Args:
        most: how many entries of each kind are shown.
    """
    from torch_tpu.metrics.report_text import text

    return text(snapshot(), most)
