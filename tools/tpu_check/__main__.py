"""The command `make tpu-check`: lowers what is not lowered yet, compiles what is not compiled yet, sums up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console

from tools.conformance import pool
from tools.conformance.__main__ import chosen_of
from tools.conformance.database import DTYPES, dtype_name, entries
from tools.tpu_check import compile as compiling
from tools.tpu_check import lower, report, results
from tools.tpu_check.compile import TARGETS
from torch_tpu import progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# Those that TPUs compute in by themselves.
DEFAULT_DTYPES = "float32,bfloat16,int32,bool"
Item = TypeVar("Item")


@app.command()
def main(
    kind: Annotated[str, typer.Option(help=f"Only these kinds, of {','.join(lower.CALLS)}.")] = "",
    ops: Annotated[str, typer.Option(help="Only what has a name that matches this regular expression.")] = "",
    dtypes: Annotated[str, typer.Option(help="Dtypes, separated by commas; empty: all.")] = DEFAULT_DTYPES,
    targets: Annotated[str, typer.Option(help="Topologies to compile for.")] = ",".join(TARGETS),
    samples: Annotated[int, typer.Option(help="At most so many sample inputs per operator; 0: all.")] = 2,
    restart: Annotated[bool, typer.Option(help="Lower again what is lowered; compile what is new.")] = False,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile what is not compiled yet.")] = True,
    table: Annotated[Path | None, typer.Option(help="Write the result to this page.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that work at the same time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the results are kept.")] = Path("tpu-check-results"),
) -> None:
    """Compiles the programs of PyTorch's own test database for TPUs; no TPU is needed. Continues where it ended."""
    console = Console()
    programs = output / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    wanted = [getattr(torch, name) for name in chosen_of(dtypes, [dtype_name(d) for d in DTYPES], "dtype")]
    chosen = entries(ops, wanted, chosen_of(kind, tuple(lower.CALLS), "kind"))

    path = output / "results.jsonl"
    known = results.load_results(path)
    waiting = [e for e in chosen if restart or e not in known or known[e].asked != samples]
    job = pool.Job(output / "workers.log", functools.partial(lower.run, samples=samples, folder=programs))
    with path.open("a") as file:
        for entry, outcome in _shown(console, "lower", pool.run(waiting, job, workers=workers), len(waiting)):
            known[entry] = results.from_outcome(entry, samples, outcome)
            file.write(known[entry].line() + "\n")
            file.flush()

    path = output / "verdicts.jsonl"
    verdicts = results.load_verdicts(path)
    # Small ones first; and those that take the compiler long come together.
    found = {d for e in chosen for d in known[e].lowered.programs}
    digests = sorted(found, key=lambda d: ((programs / d).stat().st_size, d))
    wanted_targets = targets.split(",")
    left = {target: [d for d in digests if (d, target) not in verdicts] for target in wanted_targets}
    batches = compiling.batches(left) if compile_ else []
    judged = compiling.verdicts(batches, programs, output / "workers.log", workers)
    with path.open("a") as file:
        for several in _shown(console, "compile", judged, len(batches)):
            for verdict in several:
                verdicts[verdict.digest, verdict.target] = verdict
                file.write(results.verdict_line(verdict) + "\n")
            file.flush()

    summary = report.Summary([known[e] for e in chosen], verdicts, wanted_targets)
    report.show(console, summary)
    if table is not None:
        table.write_text(report.page(summary))
    if summary.failures:
        raise typer.Exit(1)


def _shown(console: Console, what: str, items: Iterable[Item], count: int) -> Iterator[Item]:
    """The same items; how many there were is shown."""
    with progress.shown(what, count, console) as task:
        for item in items:
            task.advance()
            yield item


if __name__ == "__main__":
    app()
