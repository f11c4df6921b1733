"""The results file: one JSON line per program that was run; lines of another generator count for nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """A line of the file.

    Attributes:
        generator: of which seeds are meant, from `generator_digest`.
        report: how the shrunk program fails; None where it does not.
    """

    seed: int
    mode: str
    generator: str
    report: str | None


def generator_digest() -> str:
    """Changes with everything that decides which program belongs to a seed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def save(path: Path, results: Sequence[Result]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


def load(path: Path, mode: str) -> dict[int, Result]:
    """The latest result of every seed in a mode; a last line that was cut off is ignored."""
    found: dict[int, Result] = {}
    generator = generator_digest()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        if (result.mode, result.generator) == (mode, generator):
            found[result.seed] = result
    return found
