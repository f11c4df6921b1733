"""How far long work is: a bar on a terminal; where the output is a file or a pipe, a plain line every ten seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds between two lines.
INTERVAL = 10.0


class Task:
    """Work that is told how much of it is done.

    Attributes:
        total: how many steps there are; None where nobody knows.
        note: what there is to say of it, such as the last step's name.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.note = ""

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.note = note or self.note

    def line(self, seconds: float) -> str:
        """The state after so many seconds: `training: 120 of 600 (20%), loss 2.310, 12 s so far, about 48 s left`."""
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,} of {self.total:,} ({self.done / max(self.total, 1):.0%})")
        if self.note:
            parts.append(self.note)
        parts.append(f"{duration(seconds)} so far")
        if self.total and 0 < self.done < self.total:
            parts.append(f"about {duration(seconds * (self.total - self.done) / self.done)} left")
        return f"{self.what}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@contextlib.contextmanager
def shown(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Task]:
    """Shows how far the work inside is.

    Args:
        console: where to; the standard output by default.
    """
    console = console or Console()
    task = Task(what, total)
    with _bar(task, console) if console.is_terminal else lines(task, console):
        yield task


@contextlib.contextmanager
def lines(task: Task, console: Console) -> Iterator[None]:
    """A line every `INTERVAL` seconds, whether or not the work has advanced; none for work that is done sooner."""
    began, ended = time.monotonic(), threading.Event()

    def write() -> None:
        while not ended.wait(INTERVAL):
            say(task.line(time.monotonic() - began), console)

    writer = threading.Thread(target=write, name="torch_tpu progress", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def say(text: str, console: Console) -> None:
    """A line of a log: not broken, not coloured, and there at once."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


@contextlib.contextmanager
def _bar(task: Task, console: Console) -> Iterator[None]:
    counted = (BarColumn(), MofNCompleteColumn()) if task.total is not None else (SpinnerColumn(),)
    times = (TimeElapsedColumn(), TimeRemainingColumn()) if task.total is not None else (TimeElapsedColumn(),)
    note = TextColumn("{task.fields[note]}")
    with Progress(TextColumn("{task.description}"), *counted, *times, note, console=console) as bar:
        number = bar.add_task(task.what, total=task.total, note="")
        advance = task.advance

        def shown_advance(count: int = 1, note: str = "") -> None:
            advance(count, note)
            bar.update(number, completed=task.done, note=task.note)

        task.advance = shown_advance  # type: ignore[method-assign]
        yield
