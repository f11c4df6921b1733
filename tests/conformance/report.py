"""Tables of a run: totals by dtype, failures by kind, operators that ran on the CPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.conformance.database import DTYPES, dtype_name
from tests.conformance.results import Result


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else "0"


def totals(results: Sequence[Result]) -> Table:
    """Pairs run, passed, and passed without the CPU, by dtype."""
    table = Table("dtype", title="(operator, dtype) pairs")
    for heading in ("run", "passed", "without the CPU"):
        table.add_column(heading, justify="right")
    by_dtype: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_dtype[result.entry.dtype].append(result)
    rows = [(name, by_dtype[name]) for name in map(dtype_name, DTYPES) if by_dtype[name]]
    for name, group in [*rows, ("all", list(results))]:
        if name == "all":
            table.add_section()
        passed = [r for r in group if r.passed]
        alone = [r for r in passed if not r.fallbacks]
        table.add_row(name, f"{len(group):,}", _share(len(passed), len(group)), _share(len(alone), len(group)))
    return table


def failures(results: Sequence[Result]) -> Table:
    """Kinds of failures, the most frequent first, with the operators they hit."""
    pairs: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        for kind in {(f["check"], f["kind"]) for f in result.failures}:
            counts[kind] += 1
            name = f"{result.entry.op}.{result.entry.variant}" if result.entry.variant else result.entry.op
            pairs[kind][name] = None
    table = Table("check", "difference", "pairs", "operators", title="failures by kind")
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
