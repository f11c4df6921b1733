"""The command `python -m tools.operators`: tells how the device answers each of PyTorch's operators."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch  # noqa: F401  (registers the device)
import typer
from rich.console import Console

from tools.operators import reach
from tools.operators.page import page
from torch_tpu import progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="The file to write; without it, the terminal.")] = None,
) -> None:
    """Writes the page docs/operators.md. Takes half a minute."""
    # Not on the standard output, where the page goes; and PyTorch's own lines on the other one are dropped.
    console = Console(file=os.fdopen(os.dup(2), "w"))
    with _without_stderr(), progress.shown("trying operators", len(reach.overloads()), console) as task:
        answers = reach.answers(task.advance)
    text = page(answers)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what PyTorch's C++ code writes: many operators are deprecated, and say so."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    app()
