"""Worker processes that check entries. One that crashes or hangs costs its entry, not the run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

# What is checked: picklable.
Entry = TypeVar("Entry")

# XLA keeps what it allocated; a fresh process starts small again.
ENTRIES_PER_WORKER = 300
# The module with most samples has 857 of them, five checks each.
SECONDS_PER_ENTRY = 1800.0
# Importing takes seconds, minutes where many others compute.
START_SECONDS = 900.0


class Job(NamedTuple, Generic[Entry]):
    """What the workers do with an entry.

    Attributes:
        log: where to write what libraries print.
        check: what to do with an entry; picklable. What it returns gets an item "seconds".
    """

    log: Path
    check: Callable[[Entry], dict[str, Any]]


def _work(connection: Connection, job: Job[Any]) -> None:
    """A worker's life: entries in, outcomes out, until None. What libraries print goes to the log."""
    descriptor = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["TORCH_TPU_FALLBACK"] = "allow"

    import torch

    from torch_tpu.eager.host import shape_churn

    shape_churn.MOST_SHAPES = sys.maxsize  # each shape is to have its program
    torch.set_num_threads(1)
    connection.send(None)
    while (entry := connection.recv()) is not None:
        connection.send(job.check(entry))


class _Worker:
    def __init__(self, job: Job[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, job), daemon=True)
        self.process.start()
        theirs.close()
        self.entry: Any = None
        self.ready = False
        self.done = 0
        self.began = time.monotonic()

    @property
    def limit(self) -> float:
        """How many seconds it may be silent."""
        return SECONDS_PER_ENTRY if self.ready else START_SECONDS

    def overdue(self) -> bool:
        return (self.entry is not None or not self.ready) and time.monotonic() - self.began > self.limit

    def give(self, entry: Any) -> None:
        self.entry, self.began = entry, time.monotonic()
        self.connection.send(entry)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(entries: Iterable[Entry], job: Job[Entry], *, workers: int) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Each entry with what its check found, as they finish."""
    waiting = list(reversed(list(entries)))
    pool = [_Worker(job) for _ in range(min(workers, len(waiting)))]
    try:
        while pool:
            for connection in wait([w.connection for w in pool], timeout=5.0):
                worker = next(w for w in pool if w.connection is connection)
                try:
                    outcome = worker.connection.recv()
                except (EOFError, OSError):
                    yield from _lost(pool, worker, f"the process ended with code {_exit_code(worker)}")
                    _replace(pool, worker, bool(waiting), job)
                    continue
                if not worker.ready:
                    worker.ready = True
                elif worker.entry is not None:
                    worker.done += 1
                    yield worker.entry, {**outcome, "seconds": round(time.monotonic() - worker.began, 2)}
                    worker.entry = None
                if not waiting or worker.done >= ENTRIES_PER_WORKER:
                    _replace(pool, worker, bool(waiting), job)
                else:
                    worker.give(waiting.pop())
            for worker in [w for w in pool if w.overdue()]:
                yield from _lost(pool, worker, f"no answer in {worker.limit:.0f} s")
                _replace(pool, worker, bool(waiting), job)
    finally:
        for worker in pool:
            worker.stop()


def _exit_code(worker: _Worker) -> int | None:
    worker.process.join(5.0)
    return worker.process.exitcode


def _lost(pool: list[_Worker], worker: _Worker, why: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The failed entry of a worker that is no more.

    Raises:
        RuntimeError: where it never started, which the next one would not either.
    """
    if worker.entry is None:
        raise RuntimeError(f"a worker could not start: {why}")
    failure = {"check": "process", "kind": "crash", "sample": "", "message": why}
    yield worker.entry, {"samples": 0, "failures": [failure], "fallbacks": {}, "seconds": 0.0}


def _replace(pool: list[_Worker], worker: _Worker, more: bool, job: Job[Any]) -> None:
    worker.stop()
    pool.remove(worker)
    if more:
        pool.append(_Worker(job))
