"""What a run found: totals by dtype and target, refusals with the compiler's reason, operators left to the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.conformance.database import DTYPES, dtype_name
from tests.tpu_check.results import Result

Reasons = Mapping[tuple[str, str], str]


class Total(NamedTuple):
    """Of one dtype: entries lowered, how many of them need the CPU, distinct programs, how many compile per target."""

    dtype: str
    entries: int
    with_cpu: int
    programs: int
    compiled: tuple[int, ...]


class Exceptional(NamedTuple):
    """An ATen operator that a TPU does not run, why not, and in which dtypes the database met that."""

    operator: str
    reason: str
    dtypes: tuple[str, ...]


class Summary:
    """The figures of some results, with what the compiler says of their programs."""

    def __init__(self, results: Sequence[Result], reasons: Reasons, targets: Sequence[str]) -> None:
        self.targets = tuple(targets)
        lowered = [r for r in results if r.lowered.samples or r.lowered.failures]
        self.totals = [self._total(dtype, lowered, reasons) for dtype in map(dtype_name, DTYPES)]
        self.totals = [total for total in self.totals if total.entries]
        self.on_cpu = _grouped((n, why, r) for r in lowered for n, why in r.lowered.fallbacks.items())
        refused = [
            (operator, _in_short(reason), r)
            for r in lowered
            for digest, operator in r.lowered.programs.items()
            for target in targets
            if (reason := reasons.get((digest, target)))
        ]
        raised = [(*failure.split(": ", 1), r) for r in lowered for failure in r.lowered.failures]
        self.failures = _grouped([*refused, *((n, why, r) for n, why, r in raised)])

    def _total(self, dtype: str, results: Sequence[Result], reasons: Reasons) -> Total:
        mine = [r for r in results if r.entry.dtype == dtype]
        digests = {d for r in mine for d in r.lowered.programs}
        compiled = tuple(sum(reasons.get((d, target)) == "" for d in digests) for target in self.targets)
        return Total(dtype, len(mine), sum(bool(r.lowered.fallbacks) for r in mine), len(digests), compiled)


def _grouped(found: Iterable[tuple[str, str, Result]]) -> list[Exceptional]:
    dtypes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for operator, reason, result in found:
        dtypes[operator, reason].add(result.entry.dtype)
    order = [dtype_name(d) for d in DTYPES]
    return [Exceptional(*key, tuple(sorted(dtypes[key], key=order.index))) for key in sorted(dtypes)]


def _in_short(reason: str) -> str:
    """The compiler's message up to where it quotes the program."""
    return reason.splitlines()[0][:300]


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else "0"


def _rows(summary: Summary) -> list[list[str]]:
    return [
        [t.dtype, f"{t.entries:,}", f"{t.with_cpu:,}", f"{t.programs:,}", *(_share(n, t.programs) for n in t.compiled)]
        for t in summary.totals
    ]


def _headings(summary: Summary) -> list[str]:
    return ["dtype", "entries", "that need the CPU", "programs", *(f"compile for {t}" for t in summary.targets)]


def show(console: Console, summary: Summary) -> None:
    for title, found in (("not compiled", summary.failures), ("on the CPU", summary.on_cpu)):
        if found:
            table = Table("operator", "reason", "dtypes", title=title)
            for each in found:
                table.add_row(each.operator, each.reason, ", ".join(each.dtypes))
            console.print(table)
    table = Table(*_headings(summary), title="programs for TPUs")
    for row in _rows(summary):
        table.add_row(*row)
    console.print(table)


def page(summary: Summary) -> str:
    """The result as Markdown."""
    lines = [
        "# Operators on TPUs",
        "",
        "Written by `make tpu-check OPTIONS=--table=docs/tpu-operators.md`, which takes sample inputs of each",
        "operator, module and optimizer of PyTorch's own test database, and compiles every program they are made of,",
        f"forward and backward, with the compiler of libtpu {metadata.version('libtpu')}. No TPU was at hand: the",
        "programs were compiled, not run. Equal programs count once for each dtype.",
        "",
        _line(_headings(summary)),
        _line(["---"] * len(_headings(summary))),
        *(_line(row) for row in _rows(summary)),
        "",
        "## What a TPU does not run",
        "",
        "These run on the CPU instead, with a warning (`TORCH_TPU_FALLBACK`). Which they are is known when a call is",
        "made, before anything runs, so a fused program is never refused because of them.",
        "",
        _line(["ATen operator", "dtypes", "reason"]),
        _line(["---"] * 3),
        *(_line([f"`{e.operator}`", ", ".join(e.dtypes), e.reason]) for e in summary.on_cpu),
    ]
    if summary.failures:
        lines += ["", "## What fails", "", _line(["ATen operator", "dtypes", "reason"]), _line(["---"] * 3)]
        lines += [_line([f"`{e.operator}`", ", ".join(e.dtypes), e.reason]) for e in summary.failures]
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(c.replace('|', '¦') for c in cells)} |"
