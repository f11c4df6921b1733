"""The results file: one JSON line per checked entry; the latest line of an entry counts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.conformance.database import Entry


@dataclass(frozen=True)
class Result:
    """A line of the file.

    Attributes:
        asked: the most sample inputs that were to be checked, 0 for all.
        checks: the checks that were made.
        failures: dicts of check, kind, sample and message.
        fallbacks: operators that ran on the CPU, and how often.
        inexact: as `Outcome` says.
    """

    entry: Entry
    asked: int
    checks: tuple[str, ...]
    samples: int
    failures: list[dict[str, str]]
    fallbacks: dict[str, int]
    seconds: float
    inexact: int = 0

    @property
    def passed(self) -> bool:
        return not self.failures

    def covers(self, asked: int, checks: Collection[str]) -> bool:
        """Whether a run that asks for this much need not check the entry again."""
        return (self.asked == 0 or 0 < asked <= self.asked) and set(checks) <= set(self.checks)

    def line(self) -> str:
        return json.dumps({**vars(self), "entry": list(self.entry)})


def from_outcome(entry: Entry, asked: int, checks: tuple[str, ...], outcome: dict[str, Any]) -> Result:
    return Result(entry, asked, checks, **outcome)


def load(path: Path) -> dict[Entry, Result]:
    """The latest result of every entry; a last line that was cut off is ignored."""
    found: dict[Entry, Result] = {}
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        entry = Entry(*fields.pop("entry"))
        found[entry] = Result(entry, fields.pop("asked"), tuple(fields.pop("checks")), **fields)
    return found
