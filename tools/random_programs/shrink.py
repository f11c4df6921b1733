"""Makes a failing program shorter: drops steps as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.random_programs.program import Step
from tools.random_programs.run import Failure, Invalid

Check = Callable[[Sequence[Step]], Failure | None]


def shrink(steps: Sequence[Step], failure: Failure, check: Check) -> tuple[tuple[Step, ...], Failure]:
    """The shortest program found, and how it fails.

    Its last step is the one at which the given program fails.

    Args:
        check: runs steps and says how they fail.
    """
    kept = tuple(steps[: failure.at + 1])
    shorter = True
    while shorter:
        shorter = False
        for drop in reversed(range(len(kept) - 1)):
            trial = kept[:drop] + kept[drop + 1 :]
            found = _checked(trial, check)
            if found is not None and failure.alike(found) and found.at == len(trial) - 1:
                kept, failure, shorter = trial, found, True
    return kept, failure


def _checked(steps: Sequence[Step], check: Check) -> Failure | None:
    try:
        return check(steps)
    except Invalid:
        return None
