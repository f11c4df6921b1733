"""The counters: whole numbers and seconds by name."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

# No Counter: adding to one takes twice the time, and each operator does.
counters: defaultdict[str, int] = defaultdict(int)
seconds: dict[str, float] = {}


def count(name: str, amount: int = 1) -> None:
    counters[name] += amount


def add_seconds(name: str, amount: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + amount


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Adds the wall time of a block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        add_seconds(name, time.perf_counter() - began)


def nonzero() -> dict[str, int | float]:
    return {**{k: v for k, v in counters.items() if v}, **{k: v for k, v in seconds.items() if v}}


def reset() -> None:
    counters.clear()
    seconds.clear()
