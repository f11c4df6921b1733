"""Tables of a run: totals by kind and dtype, failures by kind, operators that ran on the CPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tools.conformance.database import DTYPES, KINDS, dtype_name
from tools.conformance.results import Result


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else "0"


def totals(results: Sequence[Result]) -> Table:
    """Pairs run, passed, and passed without the CPU, by kind and dtype."""
    table = Table("kind", "dtype", title="(name, dtype) pairs")
    for heading in ("run", "passed", "without the CPU"):
        table.add_column(heading, justify="right")
    # A dtype that the CPU has no samples for says nothing.
    compared = [r for r in results if r.samples or r.failures]
    for kind in KINDS:
        of_kind = [r for r in compared if r.entry.kind == kind]
        by_dtype = [(name, [r for r in of_kind if r.entry.dtype == name]) for name in map(dtype_name, DTYPES)]
        if of_kind:
            table.add_section()
        for name, group in [*by_dtype, ("all", of_kind)]:
            passed = [r for r in group if r.passed]
            alone = [r for r in passed if not r.fallbacks]
            if group:
                shares = (_share(len(part), len(group)) for part in (passed, alone))
                table.add_row(kind, name, f"{len(group):,}", *shares)
    return table


def failures(results: Sequence[Result]) -> Table:
    """Kinds of failures, the most frequent first, with the names they hit."""
    pairs: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        for kind in {(f["check"], f["kind"]) for f in result.failures}:
            counts[kind] += 1
            name = f"{result.entry.op}.{result.entry.variant}" if result.entry.variant else result.entry.op
            pairs[kind][name] = None
    table = Table("check", "difference", "pairs", "names", title="failures by kind")
    for (check, kind), count in counts.most_common():
        table.add_row(check, kind, str(count), ", ".join(pairs[check, kind]))
    return table


def fallbacks(results: Sequence[Result]) -> Table:
    """ATen operators that ran on the CPU, by the number of pairs they are part of."""
    pairs: Counter[str] = Counter()
    for result in results:
        pairs.update(result.fallbacks.keys())
    table = Table("ATen operator", "pairs", title="ran on the CPU")
    for name, count in pairs.most_common():
        table.add_row(name, str(count))
    return table


def show(console: Console, results: Sequence[Result]) -> None:
    for table in (failures(results), fallbacks(results), totals(results)):
        if table.row_count:
            console.print(table)
    compiled = [r for r in results if r.entry.kind == "compiled" and r.samples]
    if compiled:
        exact = sum(not r.inexact for r in compiled)
        console.print(f"compiled operators that equal eager in every bit: {_share(exact, len(compiled))}")
