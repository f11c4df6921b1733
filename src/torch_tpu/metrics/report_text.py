"""The report as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Entries = list[dict[str, Any]]
# A graph with so many programs for shapes gets advice.
MANY = 8


def text(snapshot: Mapping[str, Any], most: int) -> str:
    """A snapshot for people to read, `most` entries of each kind."""
    return "\n".join(_report(snapshot, most))


def _report(snapshot: Mapping[str, Any], most: int) -> Iterator[str]:
    yield "torch_tpu metrics"
    # What has a section of its own, with lines, is not listed here.
    counters = {k: v for k, v in snapshot["counters"].items() if "::" not in k}
    for name, value in sorted(counters.items()):
        yield f"  {name:<28} {value:.3f}" if isinstance(value, float) else f"  {name:<28} {value:,}"
    yield from _recompiles(snapshot["recompiles"], most)
    yield from _graphs(snapshot["graphs"], most)
    yield from _lines("graph breaks", snapshot["graph_breaks"], most)
    yield from _lines("waits for the device (sync points)", snapshot["syncs"], most)
    yield from _lines("flushes of fused eager", snapshot["flushes"], most)
    yield from _lines("operators on the CPU (fallbacks)", snapshot["fallbacks"], most)
    yield from _lines("small operators of many shapes, on the CPU", snapshot["hosted"], most)


def _recompiles(made: Entries, most: int) -> Iterator[str]:
    """Programs of the same operator for the same line stand together, with their latest reason."""
    grouped: dict[tuple[str, str], Entries] = {}
    for entry in made:
        grouped.setdefault((entry["name"], entry["line"]), []).append(entry)
    yield f"  {'recompiles':<28} {len(made):,}" + (", the latest first" if made else "")
    for (name, line), entries in _first(grouped.items(), most):
        times = f" ×{len(entries)}" if len(entries) > 1 else ""
        yield f"    {name}{times}  at {line}, after {entries[0]['after']:,} runs"
        yield f"      {entries[0]['reason']}"
    yield from _rest(len(grouped), most)


def _graphs(graphs: Entries, most: int) -> Iterator[str]:
    told = [g for g in graphs if g["reason"] or g["refused"] or g["unpadded"] or g["layers"] or len(g["programs"]) > 1]
    yield f"  {'graphs of torch.compile':<28} {len(graphs):,}"
    for graph in _first(told, most):
        yield f"    {graph['name']}  at {graph['line']}"
        if graph["reason"]:
            yield f"      captured again: {graph['reason']}"
        if graph["refused"]:
            how = "as several programs" if graph["in_pieces"] else "operator by operator"
            yield f"      ran {how} {graph['in_pieces'] or graph['by_operator']:,} times: {graph['refused']}"
        if graph["unpadded"]:
            yield f"      can't be padded, so it has a program for each shape: {graph['unpadded']}"
        if not graph["is_padded"] and _is_for_shapes(graph["programs"]):
            yield "      its sizes vary: options={'buckets': True} of torch.compile(backend='tpu') makes few programs"
        if graph["layers"]:
            yield f"      {graph['layers']} equal layers share one of its {graph['parts']} programs"
        for program in _first([p for p in graph["programs"] if p["reason"]], most):
            yield f"      compiled again: {program['reason']}"
    yield from _rest(len(told), most)


def _is_for_shapes(made: Entries) -> bool:
    """Whether programs are many, and for other shapes each."""
    return len(made) >= MANY and all("shape of" in p["reason"] for p in made[1:])


def _lines(title: str, events: Entries, most: int) -> Iterator[str]:
    yield f"  {title:<28} {sum(e['count'] for e in events):,}"
    for event in _first(events, most):
        detail = f": {event['detail']}" if event["detail"] else ""
        yield f"    {event['count']:>7,} × {event['what']}  at {event['line']}  {event['source']}{detail}".rstrip()
    yield from _rest(len(events), most)


def _first(entries: Iterable[Any], most: int) -> Iterator[Any]:
    return (entry for _, entry in zip(range(most), entries, strict=False))


def _rest(count: int, most: int) -> Iterator[str]:
    if count > most:
        yield f"    and {count - most:,} more (report(most=…), snapshot())"
