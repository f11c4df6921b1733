"""What the device is known to fail in PyTorch's test database, with the reason; and what it computes on the CPU.

`tests/database/test_known.py` fails when something listed here begins to work, so that the lists stay true.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.conformance.database import Entry


class Fallback(NamedTuple):
    """An ATen operator that runs on the CPU.

    Attributes:
        example: an entry of the database that reaches it.
    """

    reason: str
    example: Entry


# (entry, check) → reason.
FAILURES: dict[tuple[Entry, str], str] = {}

FALLBACKS: dict[str, Fallback] = {
    "testlib::mutating_custom_op": Fallback(
        "an operator that the database defines itself, for the CPU and CUDA only",
        Entry("auto_functionalize", "simple", "float32", "higher-order"),
    ),
}
