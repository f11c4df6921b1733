"""Checks one entry: the same on the CPU and on the device, everything a user can see compared."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

from tools.conformance import compiled, masks, modules, operators, optimizers
from tools.conformance.database import Entry
from tools.conformance.outcome import Failure, Outcome
from tools.random_programs.run import MODES
from torch_tpu import hooks
from torch_tpu.eager.host import shape_churn
from torch_tpu.eager.mode import set_eager_mode

RUNS = {
    "operator": operators.OperatorRun,
    "higher-order": operators.OperatorRun,
    "module": modules.ModuleRun,
    "optimizer": optimizers.OptimizerRun,
    "compiled": compiled.CompiledRun,
    "backward": masks.MaskRun,
}
CHECKS_OF = {
    "operator": operators.CHECKS,
    "higher-order": operators.CHECKS,
    "module": modules.CHECKS,
    "optimizer": optimizers.CHECKS,
    "compiled": compiled.CHECKS,
    "backward": masks.CHECKS,
}
CHECKS = tuple(dict.fromkeys(check for checks in CHECKS_OF.values() for check in checks))


def run(entry: Entry, *, samples: int = 0, checks: Iterable[str] = CHECKS, mode: str = "strict") -> Outcome:
    """Checks an entry on at most `samples` sample inputs spread over all of them (0: on all).

    Args:
        mode: of the device's execution, one of `MODES`.
    """
    # What the host has run for want of another program would be compared with itself.
    every_shape = mock.patch.object(shape_churn, "MOST_SHAPES", sys.maxsize)
    with warnings.catch_warnings(), set_eager_mode(MODES[mode]), every_shape:
        warnings.simplefilter("ignore")
        outcome = RUNS[entry.kind](entry, samples).outcome(frozenset(checks))
    # Nothing of one operator helps the next, and thousands of programs fill the memory.
    hooks.forget_programs()
    return outcome


def checked(entry: Entry, *, samples: int, checks: Iterable[str], mode: str) -> dict[str, Any]:
    """The outcome of `run` as a dict; what prevents the check is a failure too."""
    try:
        outcome = run(entry, samples=samples, checks=checks, mode=mode)
    except Exception as error:
        failure = Failure("samples", f"raises {type(error).__name__}", "", str(error)[:600])
        outcome = Outcome(failures=[failure])
    return outcome.as_dict()
