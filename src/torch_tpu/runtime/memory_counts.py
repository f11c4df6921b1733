"""Device memory that values occupy: bytes held now, the peak, and totals since the start.

Counted by the owner of the arrays (`tensor.storage.Value`) rather than asked of PJRT: the CPU client keeps no
statistics, and this count is exact the moment a value is made or freed. A running program's temporaries count
towards the peak.
"""

from __future__ import annotations


class MemoryCounter:
    """Byte counts of one device. Only the allocating code calls `add` and `remove`; int updates hold the GIL."""

    __slots__ = ("allocated", "allocations", "freed_total", "out_of_memory", "peak", "total")

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self.total = 0
        self.freed_total = 0
        self.allocations = 0
        self.out_of_memory = 0

    def add(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.total += nbytes
        self.allocations += 1
        if self.allocated > self.peak:
            self.peak = self.allocated

    def remove(self, nbytes: int) -> None:
        self.allocated -= nbytes
        self.freed_total += nbytes

    def program_ran(self, nbytes: int) -> None:
        """A program ran beside what is allocated, and needed so much for its results and its temporaries."""
        if self.allocated + nbytes > self.peak:
            self.peak = self.allocated + nbytes


counter = MemoryCounter()


def allocated() -> int:
    """Bytes held by live values."""
    return counter.allocated


def peak() -> int:
    """The largest number of bytes in use at one time since the start or the last `reset_peak`."""
    return counter.peak


def reset_peak() -> None:
    counter.peak = counter.allocated


def reset_accumulated() -> None:
    counter.total = counter.allocated
    counter.freed_total = 0
    counter.allocations = 0
    counter.out_of_memory = 0


def stats() -> dict[str, int]:
    """All counts by name, in bytes (`allocations` and `out_of_memory` are numbers of events)."""
    return {name: getattr(counter, name) for name in MemoryCounter.__slots__}
