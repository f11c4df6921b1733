"""One entry of the database as a test: what differs from the CPU fails, unless it is known to."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from unittest import mock

import pytest
import torch

from tools.conformance import check, known
from tools.conformance.database import Entry, entries
from torch_tpu.eager.host import shape_churn

# What most programs do with an operator; other checks and dtypes take turns in test_rotating_slice.py.
EVERYDAY = ("forward", "gradient", "inplace", "step", "state_dict")


# Operators by name, one file of tests each, so that processes can share the work. The first group that matches counts.
GROUPS = {
    "lists": r"^_",
    "functional": r"^nn\.functional\.",
    "mathematics": r"^(linalg|fft|special|signal|masked)\.",
    "a to i": r"^[a-iA-I]",
    "j to z": "",
}


def operators(group: str) -> list[Entry]:
    """The operators of a group in float32."""
    return [
        e
        for e in entries(dtypes=[torch.float32], kinds=["operator"])
        if next(name for name, pattern in GROUPS.items() if re.search(pattern, e.op)) == group
    ]


def in_float32(kind: str) -> list[Entry]:
    """All entries of another kind in float32."""
    return entries(dtypes=[torch.float32], kinds=[kind])


def assert_conforms(
    entry: Entry, *, samples: int, checks: Iterable[str] = EVERYDAY, mode: str = "strict", note: str = ""
) -> None:
    """No difference from the CPU, and nothing computed there, but what `conformance.known` lists."""
    with (
        mock.patch.dict(os.environ, TORCH_TPU_FALLBACK="allow"),
        mock.patch.object(shape_churn, "MOST_SHAPES", sys.maxsize),  # each shape is to have its program
    ):
        outcome = check.run(entry, samples=samples, checks=checks, mode=mode)
    found = [
        f"{entry}, {f.check}: {f.kind}\n  sample: {f.sample}\n  {f.message}"
        for f in outcome.failures
        if (entry, f.check) not in known.FAILURES
    ]
    found += [f"{entry}: {name} ran on the CPU" for name in outcome.fallbacks if name not in known.FALLBACKS]
    if found:
        chosen = f"--kind {entry.kind} --ops '^{entry.op}' --dtypes {entry.dtype} --mode {mode}"
        again = f".venv/bin/python -m tools.conformance {chosen}"
        pytest.fail("\n".join([*found, note, f"to see all of it: {again} --restart"]), pytrace=False)
