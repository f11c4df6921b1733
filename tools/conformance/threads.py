"""The axis "threads": two threads call the same at once, each with its own data; the first call makes the program."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from tools.conformance import again
from tools.conformance.subject import Subject, saying
from torch_tpu import hooks

ROUNDS = 3
# Seconds between two switches of threads: many within one call.
SWITCH_INTERVAL = 2e-5
WAIT = 300.0


def check(subject: Subject, sample: Any, other: Any | None) -> None:
    """Two threads compare the same forms with the CPU, one with the sample, one with other data."""
    second = other if other is not None and again.alike(subject, sample, other) else again.turned(subject, sample)
    for form in subject.forms(sample):
        hooks.forget_programs()
        with saying(f"{form.name}, in two threads"):
            at_once([functools.partial(form.check, s) for s in (sample, second)])


def at_once(functions: list[Callable[[], Any]]) -> None:
    """Calls each function `ROUNDS` times in a thread of its own, all beginning each round together.

    Raises:
        Exception: the first that one of them raised.
    """
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def work(function: Callable[[], Any]) -> None:
        try:
            for _ in range(ROUNDS):
                barrier.wait(WAIT)
                function()
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(f,), daemon=True) for f in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a thread did not end in {WAIT:.0f} s")
