"""All dtypes and all checks, a slice of them a day: in `SLICES` days all of the database has been compared.

In float32 under fused eager and along the axes of several calls as well.

`TORCH_TPU_TEST_SLICE=<number>` chooses the slice, for example that of a day on which it failed.
"""

from __future__ import annotations

import datetime
import os
import zlib

import pytest

from tests.database.compare import assert_conforms
from tools.conformance.check import CHECKS
from tools.conformance.database import Entry, entries
from tools.conformance.operators import AXES

SLICES = 90


def _today() -> int:
    chosen = os.environ.get("TORCH_TPU_TEST_SLICE")
    return int(chosen) % SLICES if chosen else datetime.date.today().toordinal() % SLICES


def _slice(number: int) -> list[Entry]:
    """Entries by a hash of their names, so that a new one moves no other."""
    return [e for e in entries() if zlib.crc32(str(e).encode()) % SLICES == number]


def test_slices_are_a_partition() -> None:
    every = entries()
    assert sorted(e for number in range(SLICES) for e in _slice(number)) == sorted(every)
    assert max(len(_slice(number)) for number in range(SLICES)) < 2 * len(every) / SLICES


@pytest.mark.parametrize("entry", _slice(_today()), ids=str)
def test_entry(entry: Entry) -> None:
    checks = [check for check in CHECKS if check not in AXES]
    assert_conforms(entry, samples=2, checks=checks, note=f"in the slice TORCH_TPU_TEST_SLICE={_today()}")


@pytest.mark.parametrize("entry", [e for e in _slice(_today()) if e.dtype == "float32"], ids=str)
def test_several_calls_of_entry(entry: Entry) -> None:
    note = f"in the slice TORCH_TPU_TEST_SLICE={_today()}"
    assert_conforms(entry, samples=1, checks=AXES, note=note)


@pytest.mark.parametrize("entry", [e for e in _slice(_today()) if e.dtype == "float32"], ids=str)
def test_entry_in_fused_mode(entry: Entry) -> None:
    note = f"in fused mode, in the slice TORCH_TPU_TEST_SLICE={_today()}"
    assert_conforms(entry, samples=2, mode="fused", note=note)
