"""The command `python -m tools.operators`: tells how the device answers each of PyTorch's operators."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch  # noqa: F401  (registers the device)
import typer

from tools.operators import reach
from tools.operators.page import page

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="The file to write; without it, the terminal.")] = None,
) -> None:
    """Writes the page docs/operators.md. Takes half a minute."""
    with _without_stderr():
        answers = reach.answers()
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
