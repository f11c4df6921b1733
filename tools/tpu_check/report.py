"""What a run found: totals by dtype and target, refusals with the compiler's reason, operators left to the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tools.conformance.database import DTYPES, dtype_name
from tools.tpu_check.compile import Verdict
from tools.tpu_check.results import Result

Verdicts = Mapping[tuple[str, str], Verdict]
# From how many seconds of a processor's time on a program is listed.
SLOW = 60.0


class Total(NamedTuple):
    """Of one dtype: entries lowered, how many of them need the CPU, distinct programs; how many of these the compiler
    was given for each target, and accepted.
    """

    dtype: str
    entries: int
    with_cpu: int
    programs: int
    tried: tuple[int, ...]
    compiled: tuple[int, ...]


class Exceptional(NamedTuple):
    """An ATen operator that a TPU does not run, why not, and in which dtypes the database met that."""

    operator: str
    reason: str
    dtypes: tuple[str, ...]


class Summary:
    """The figures of some results, with what the compiler says of their programs."""

    def __init__(self, results: Sequence[Result], verdicts: Verdicts, targets: Sequence[str]) -> None:
        self.targets = tuple(targets)
        self.samples = max((r.asked for r in results), default=0)
        lowered = [r for r in results if r.lowered.samples or r.lowered.programs or r.lowered.failures]
        by_dtype = {name: [r for r in lowered if r.entry.dtype == name] for name in map(dtype_name, DTYPES)}
        self.totals = [self._total(name, mine, verdicts) for name, mine in by_dtype.items() if mine]
        self.totals.append(self._total("all", lowered, verdicts))
        self.on_cpu = _grouped((n, why, r) for r in lowered for n, why in r.lowered.fallbacks.items())
        judged = [
            (operator, verdict, r)
            for r in lowered
            for digest, operator in r.lowered.programs.items()
            for target in targets
            if (verdict := verdicts.get((digest, target)))
        ]
        refused = [(operator, _in_short(v.reason), r) for operator, v, r in judged if v.reason]
        raised = [(*failure.split(": ", 1), r) for r in lowered for failure in r.lowered.failures]
        self.failures = _grouped([*refused, *((n, why, r) for n, why, r in raised)])
        self.slow = _grouped((n, f"{v.seconds:.0f} s for {v.target}", r) for n, v, r in judged if v.seconds >= SLOW)

    def _total(self, name: str, results: Sequence[Result], verdicts: Verdicts) -> Total:
        digests = {d for r in results for d in r.lowered.programs}
        found = [[v for d in digests if (v := verdicts.get((d, target)))] for target in self.targets]
        tried = tuple(len(each) for each in found)
        compiled = tuple(sum(not v.reason for v in each) for each in found)
        return Total(name, len(results), sum(bool(r.lowered.fallbacks) for r in results), len(digests), tried, compiled)


def _grouped(found: Iterable[tuple[str, str, Result]]) -> list[Exceptional]:
    dtypes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for operator, reason, result in found:
        dtypes[operator, reason].add(result.entry.dtype)
    order = [dtype_name(d) for d in DTYPES]
    return [Exceptional(*key, tuple(sorted(dtypes[key], key=order.index))) for key in sorted(dtypes)]


def _in_short(reason: str) -> str:
    """The compiler's message up to where it quotes the program."""
    return reason.splitlines()[0][:300]


def _share(compiled: int, tried: int, programs: int) -> str:
    if tried < programs:
        return f"{compiled:,} of {tried:,} tried" if tried else "not tried"
    return f"{compiled:,} ({100 * compiled / programs:.1f} %)" if programs else "0"


def _rows(summary: Summary) -> list[list[str]]:
    return [
        [
            total.dtype,
            *(f"{n:,}" for n in (total.entries, total.with_cpu, total.programs)),
            *(_share(*of_target, total.programs) for of_target in zip(total.compiled, total.tried, strict=True)),
        ]
        for total in summary.totals
    ]


def _headings(summary: Summary) -> list[str]:
    return ["dtype", "entries", "that need the CPU", "programs", *(f"compile for {t}" for t in summary.targets)]


def show(console: Console, summary: Summary) -> None:
    exceptions = (("not compiled", summary.failures), ("slow to compile", summary.slow), ("on the CPU", summary.on_cpu))
    for title, found in exceptions:
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
        "Written by `make tpu-check OPTIONS=--table=docs/tpu-operators.md`, which takes",
        f"at most {summary.samples} sample inputs of each operator, module and optimizer of PyTorch's own test",
        "database, and compiles every program they are made of, forward and backward, with the compiler of",
        f"libtpu {metadata.version('libtpu')}. No TPU was available: the programs were compiled, not run. Equal",
        "programs count once in each row. `--dtypes` chooses others, such as complex64 and float64 (emulated on TPUs).",
        "",
        *_table(_headings(summary), _rows(summary)),
        "",
        "## What a TPU does not run",
        "",
        "These run on the CPU instead, with a warning (`TORCH_TPU_FALLBACK`). The decision is made when the operator",
        "is called, before anything runs, so a fused program is never refused because of them.",
        "",
        *_exceptions(summary.on_cpu, "reason"),
    ]
    if summary.failures:
        lines += ["", "## What fails", "", *_exceptions(summary.failures, "reason")]
    if summary.slow:
        lines += ["", "## What the compiler takes long for", "", *_exceptions(summary.slow, "processor's time")]
    return "\n".join([*lines, ""])


def _exceptions(found: Iterable[Exceptional], column: str) -> list[str]:
    rows = [[f"`{e.operator}`", ", ".join(e.dtypes), e.reason] for e in found]
    return _table(["ATen operator", "dtypes", column], rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(headings), _line(["---"] * len(headings)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(c.replace('|', '¦') for c in cells)} |"
