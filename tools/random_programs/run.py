"""Runs a program on the CPU and on the device in lock-step, and says where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.random_programs.program import Step, execute, namespace, script
from tools.random_programs.state import Comparison, snapshot
from torch_tpu.eager.mode import EagerMode, set_eager_mode

MODES = {mode.value: mode for mode in EagerMode}


class Invalid(Exception):
    """The CPU itself doesn't do with a step what the program says: the steps don't belong together."""


@dataclass(frozen=True)
class Failure:
    """Where the devices part.

    Attributes:
        at: the index of the step.
        kind: in what they differ: "values", "strides", "raises", …
    """

    at: int
    kind: str
    message: str

    def alike(self, other: Failure | None) -> bool:
        """Whether another program fails in the same way."""
        return other is not None and other.kind == self.kind


def run(steps: Sequence[Step], mode: str = "strict", *, at_end: bool | None = None) -> Failure | None:
    """The first difference between the CPU and the device.

    Args:
        mode: of the device's execution, one of `MODES`.
        at_end: compares values after the last step only, so that a mode that defers work can. By default in such a
            mode. Shapes, strides and errors are compared after every step all the same.
    """
    with set_eager_mode(MODES[mode]):
        return _run(steps, MODES[mode] is EagerMode.DEFER_AND_FUSE if at_end is None else at_end)


def _run(steps: Sequence[Step], at_end: bool) -> Failure | None:
    host, device = namespace("cpu"), namespace("tpu")
    comparison = Comparison()
    for at, step in enumerate(steps):
        want, got = execute(step.source, host), execute(step.source, device)
        if at_end and step.raises and got is None:
            # A mode that defers work may find the mistake only when it does the work.
            got = execute("torch.accelerator.synchronize()", device)
            for name in device.keys() - host.keys():
                del device[name]
        if (type(want).__name__ if want else None) != step.raises:
            raise Invalid(f"{step.source}: {want!r}")
        if type(got) is not type(want):
            said = "nothing" if got is None else f"{type(got).__name__}: {got}"
            expected = "nothing" if want is None else f"{type(want).__name__}: {want}"
            return Failure(at, "raises", f"raises {said}\ninstead of {expected}")
        values = not at_end or at == len(steps) - 1
        try:
            seen = snapshot(device, values=values)
        except Exception as error:
            return Failure(at, "raises", f"reading the tensors raises {type(error).__name__}: {error}")
        different = comparison.differences(
            seen, snapshot(host, values=values), steps=len(steps) if at_end and values else 1
        )
        if different:
            first = different[0]
            others = f" (and {len(different) - 1} others)" if len(different) > 1 else ""
            return Failure(at, first.kind, f"{first.name}: {first.message}{others}")
    return None


def report(steps: Sequence[Step], failure: Failure) -> str:
    """A failing program for a reader: what differs after its last line, then a script."""
    return f"after the last line, {failure.message}\n\n{script(steps[: failure.at + 1])}\n"
