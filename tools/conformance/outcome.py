"""What checking an entry finds, and how one check adds to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tools.compare import Mismatch
from torch_tpu import metrics

# More differences than this of one entry say nothing new.
MOST_FAILURES = 8


@dataclass
class Failure:
    """One difference.

    Attributes:
        check: which of `check.CHECKS` found it.
        kind: what differs: "values", "dtype", "shape", "strides", "raises RuntimeError", "accepts", ...
        sample: the inputs, shortened.
    """

    check: str
    kind: str
    sample: str
    message: str


@dataclass
class Outcome:
    """What checking an entry found.

    Attributes:
        samples: how many sample inputs the CPU took; none means that there was nothing to compare with.
        fallbacks: operators that ran on the CPU, and how often.
        inexact: of what was compiled, how many samples differ from eager in some bit.
    """

    samples: int = 0
    inexact: int = 0
    failures: list[Failure] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def record(self, check: str, sample: str, function: Callable[[], None]) -> None:
        """Makes one check of one sample, unless so many failed that another says nothing new."""
        if len(self.failures) >= MOST_FAILURES:
            return
        before = fallbacks()
        try:
            function()
            # In a mode that defers work, mistakes may be found only now.
            torch.accelerator.synchronize()
        except (Mismatch, Difference) as difference:
            kind, message = difference.kind, str(difference)
        except Exception as error:
            kind, message = f"raises {type(error).__name__}", str(error)
        else:
            kind = ""
        # Wrong arguments go to the CPU for its error, which is no fallback.
        if check != "errors":
            for name, count in fallbacks().items():
                if count != before.get(name, 0):
                    self.fallbacks[name] = self.fallbacks.get(name, 0) + count - before.get(name, 0)
        if kind:
            # What the next check does not want to hear of.
            raised(torch.accelerator.synchronize)
            self.failures.append(Failure(check, kind, sample[:400], message[:600]))


class Difference(Exception):
    """One side raises what the other does not."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def raised(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def raised_by_device(function: Callable[[], Any]) -> Exception | None:
    """The same for a function that uses the device, in a mode that defers work as well."""

    def call() -> None:
        function()
        torch.accelerator.synchronize()

    return raised(call)


def check_same_exception(got: Exception | None, want: Exception) -> None:
    if got is None:
        raise Difference(f"accepts what raises {type(want).__name__}", f"the CPU raises: {want}")
    if not isinstance(got, type(want)):
        raise Difference(
            f"raises {type(got).__name__} instead of {type(want).__name__}", f"{got}\nthe CPU raises: {want}"
        )


def fallbacks() -> dict[str, int]:
    """Operators that ran on the CPU in this process, and how often."""
    prefix = "fallback::"
    return {k.removeprefix(prefix): int(v) for k, v in metrics.counters().items() if k.startswith(prefix)}
