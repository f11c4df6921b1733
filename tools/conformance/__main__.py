"""The command `make conformance`: checks what is left to check, shows progress, ends with a summary."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tools import platforms
from tools.conformance import pool, report, results
from tools.conformance.check import CHECKS, CHECKS_OF, checked
from tools.conformance.database import DTYPES, KINDS, dtype_name, entries
from tools.random_programs.run import MODES
from torch_tpu import progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def chosen_of(names: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """A list separated by commas, everything if it is empty."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) or tuple(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what} {unknown[0]}: expected {', '.join(known)}")
    return chosen


@app.command()
def main(
    kind: Annotated[str, typer.Option(help=f"Only these kinds, of {','.join(KINDS)}.")] = "",
    ops: Annotated[str, typer.Option(help="Only what has a name that matches this regular expression.")] = "",
    dtypes: Annotated[str, typer.Option(help="Only these dtypes, separated by commas.")] = "",
    checks: Annotated[str, typer.Option(help=f"Only these checks, of {','.join(CHECKS)}.")] = "",
    samples: Annotated[int, typer.Option(help="At most so many sample inputs per operator; 0: all.")] = 0,
    only_failed: Annotated[bool, typer.Option(help="Check again what failed before, nothing else.")] = False,
    restart: Annotated[bool, typer.Option(help="Check again what has a result already.")] = False,
    mode: Annotated[str, typer.Option(help=f"The device's execution mode, of {', '.join(MODES)}.")] = "strict",
    platform: Annotated[str, typer.Option(help="What to run on: xcpu, or what TORCH_TPU_PLATFORM may name.")] = "",
    workers: Annotated[int, typer.Option(help="Processes that check at the same time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the results are kept.")] = Path("conformance-results"),
) -> None:
    """Compares the device with the CPU on PyTorch's own test database. Continues where the last run ended."""
    if mode not in MODES:
        raise typer.BadParameter(f"unknown mode {mode}: expected {', '.join(MODES)}")
    if not platforms.choose(platform):
        raise typer.BadParameter(platforms.PLUGIN_IS_MISSING)
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    path = output / platforms.file_of("results", "" if mode == "strict" else mode, platform)
    wanted_dtypes = [getattr(torch, name) for name in chosen_of(dtypes, [dtype_name(d) for d in DTYPES], "dtype")]
    chosen = entries(ops, wanted_dtypes, chosen_of(kind, KINDS, "kind"))
    wanted_checks = chosen_of(checks, CHECKS, "check")
    known = results.load(path)
    if only_failed:
        chosen = [e for e in chosen if e in known and not known[e].passed]
        waiting = chosen
    elif restart:
        waiting = chosen
    else:
        waiting = [
            e
            for e in chosen
            if e not in known or not known[e].covers(samples, {*wanted_checks}.intersection(CHECKS_OF[e.kind]))
        ]
    console.print(f"{len(chosen):,} pairs, {len(waiting):,} to check")

    with progress.shown("checking", len(waiting), console) as task, path.open("a") as file:
        failed = 0
        check = functools.partial(checked, samples=samples, checks=wanted_checks, mode=mode)
        job = pool.Job(output / "workers.log", check)
        for entry, outcome in pool.run(waiting, job, workers=workers):
            result = results.from_outcome(entry, samples, wanted_checks, outcome)
            known[entry] = result
            file.write(result.line() + "\n")
            file.flush()
            failed += not result.passed
            task.advance(note=f"{failed} failed, {entry}")
    report.show(console, [known[e] for e in chosen if e in known])
    if any(not known[e].passed for e in chosen if e in known):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
