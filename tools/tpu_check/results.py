"""The files of a run: a JSON line for each entry that was lowered, and for each program and target compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.conformance.database import Entry
from tools.tpu_check.compile import Verdict
from tools.tpu_check.lower import Lowered


@dataclass(frozen=True)
class Result:
    """An entry and what it became; the latest line of an entry counts.

    Attributes:
        asked: the most samples that were to be lowered.
    """

    entry: Entry
    asked: int
    lowered: Lowered

    def line(self) -> str:
        return json.dumps({"entry": list(self.entry), "asked": self.asked, **vars(self.lowered)})


def from_outcome(entry: Entry, asked: int, outcome: dict[str, Any]) -> Result:
    """Of what a worker says; of one that crashed, a failure."""
    outcome.pop("seconds", None)
    failures = [f if isinstance(f, str) else f["message"] for f in outcome.pop("failures")]
    return Result(entry, asked, Lowered(**{**outcome, "failures": failures}))


def load_results(path: Path) -> dict[Entry, Result]:
    found = {}
    for fields in _lines(path):
        entry = Entry(*fields.pop("entry"))
        found[entry] = Result(entry, fields.pop("asked"), Lowered(**fields))
    return found


def load_verdicts(path: Path) -> dict[tuple[str, str], Verdict]:
    """By digest and target."""
    found = (Verdict(**fields) for fields in _lines(path))
    return {(verdict.digest, verdict.target): verdict for verdict in found}


def verdict_line(verdict: Verdict) -> str:
    return json.dumps(verdict._asdict())


def _lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file but one that was cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
