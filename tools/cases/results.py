"""The results file: one JSON line per program that was run; the latest line of a program counts."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """A line of the file.

    Attributes:
        name: the program's file, without the ending.
        digest: of the program's text; a result of another text counts for nothing.
        failure: how it fails on the device; empty where it passes.
        refusal: how CPU PyTorch's `aot_eager` fails on the same program, where a compiled one fails.
    """

    name: str
    digest: str
    failure: str
    refusal: str
    seconds: float

    @property
    def outcome(self) -> str:
        if not self.failure:
            return "pass"
        return "cannot compile" if _without_names(self.refusal) == _without_names(self.failure) else "fail"


def _without_names(failure: str) -> str:
    """What is said of a device and of a backend, whichever they are."""
    return re.sub(r"device='\w+(:\d+)?'(, )?|backend='\w+'", "", failure)


def digest_of(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()[:16]


def save(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def load(path: Path) -> dict[str, Result]:
    """The latest result of every program; a last line that was cut off is ignored."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[result.name] = result
    return found
