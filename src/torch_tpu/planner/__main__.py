"""The process in which a script is planned: started by `torch-tpu plan`, so that each plan has a client of its own."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from pathlib import Path

from rich.console import Console

from torch_tpu import progress
from torch_tpu.planner import NothingToPlanError, plan_script


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_tpu.planner")
    parser.add_argument("--target", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    console = Console(stderr=True)
    task = progress.Task(f"{given.script.name} runs without values")

    def compiled(done: int, count: int) -> None:
        task.what, task.total, task.done = f"compiling for {given.target}", count, done
        _show(done, count)

    try:
        # A terminal has the line of `_show`, which a bar would break where the script prints too.
        with contextlib.nullcontext() if console.is_terminal else progress.lines(task, console):
            made = plan_script(
                given.script,
                given.arguments,
                given.target,
                given.steps,
                given.tokens,
                given.samples,
                compiled,
                given.save,
            )
    except NothingToPlanError as error:
        sys.exit(f"{given.script}: {error}")
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(given.script):
            trace = trace.tb_next
        if trace is None:  # not of the script
            raise
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)
    given.json.write_text(made.to_json())


def _show(done: int, count: int) -> None:
    # A terminal shows one line that changes, a log one line for each program.
    begin, end = ("\r", "\n" if done == count else "") if sys.stderr.isatty() else ("", "\n")
    print(f"{begin}compiled {done} of {count} programs", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
