"""`python -m tools.random_programs`: runs the programs of many seeds, and prints those that fail as scripts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools import platforms
from tools.random_programs import results
from tools.random_programs.check import check_all
from tools.random_programs.results import Result
from tools.random_programs.run import MODES
from torch_tpu import progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# Programs that one process runs in a row, which share what was compiled.
BATCH = 25
# XLA keeps what it allocated; a fresh process starts small again.
BATCHES_PER_PROCESS = 8


def run_all(seeds: Sequence[int], mode: str, workers: int) -> Iterator[list[Result]]:
    """The results of all seeds, a batch at a time as they finish.

    Raises:
        RuntimeError: where a program ends its process; it says which seeds were running.
    """
    # A pool per round: the executor's own `max_tasks_per_child` hangs when every worker has had its share.
    most = BATCH * BATCHES_PER_PROCESS * workers
    for i in range(0, len(seeds), most):
        yield from _round(seeds[i : i + most], mode, workers)


def _round(seeds: Sequence[int], mode: str, workers: int) -> Iterator[list[Result]]:
    batches = [seeds[i : i + BATCH] for i in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(check_all, batch, mode): batch for batch in batches}
        for future in as_completed(running):
            try:
                yield future.result()
            except BrokenProcessPool as error:
                lost = [batch[0] for future, batch in running.items() if not future.done() or future.exception()]
                raise RuntimeError(
                    f"a program ended its process, in one of the batches of {BATCH} from the seeds {lost[:workers]}; "
                    "`--workers 1 --count 1 --seed N` tells which"
                ) from error
            finally:
                del running[future]


@app.command()
def main(
    count: Annotated[int, typer.Option(min=1, help="How many programs.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="The first program's seed; the others follow.")] = 0,
    mode: Annotated[str, typer.Option(help=f"The device's execution mode, of {', '.join(MODES)}.")] = "strict",
    restart: Annotated[bool, typer.Option(help="Run again what has a result already.")] = False,
    platform: Annotated[str, typer.Option(help="What to run on: xcpu, or what TORCH_TPU_PLATFORM may name.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes that run at the same time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the results are kept.")] = Path("conformance-results"),
) -> None:
    """Compares the device with the CPU, step by step through random programs. Continues where the last run ended.

    Programs that failed are run again.
    """
    if mode not in MODES:
        raise typer.BadParameter(f"unknown mode {mode}: expected {', '.join(MODES)}")
    if not platforms.choose(platform):
        raise typer.BadParameter(platforms.PLUGIN_IS_MISSING)
    os.environ["TORCH_TPU_FALLBACK"] = "error"
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    path = output / platforms.file_of("programs", platform)
    known = {} if restart else {s: r for s, r in results.load(path, mode).items() if r.report is None}
    seeds = range(seed, seed + count)
    waiting = [s for s in seeds if s not in known]
    console.print(f"{count:,} programs, {len(waiting):,} to run")
    failed = 0
    with progress.shown("running programs", len(waiting), console) as task:
        for batch in run_all(waiting, mode, workers):
            results.save(path, batch)
            for result in batch:
                if result.report is not None:
                    failed += 1
                    console.print(f"seed {result.seed}: {result.report}", markup=False, highlight=False, soft_wrap=True)
            task.advance(len(batch), f"{failed} failed")
    console.print(f"{count - failed:,} of {count:,} programs do the same on both devices ({mode} mode)")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
