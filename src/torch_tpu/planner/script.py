"""Runs an unchanged script, or calls a function, on a topology, and finds its steps.

A training step ends with a step of the first optimizer. Without an optimizer a step is the shortest sequence of
programs that repeats at the end and leaves out none that ran in the second half; where nothing repeats, it is
everything after the parameters were made. Programs of the last step count; those before are set-up.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as registration
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_tpu.planner.record import PARAMETER, Record
from torch_tpu.runtime.client import client
from torch_tpu.runtime.topology import TopologyClient

DEFAULT_STEPS = 3


class EnoughStepsError(BaseException):
    """Ends a script whose steps have been seen; no script catches it by accident."""


@dataclass(frozen=True)
class Window:
    """The last step: its programs, from `begin` up to `end`.

    Attributes:
        kind: "training step", "repetition" or "whole run".
        steps: how many there were.
        ended: why the script did not run to its end; empty where it did.
    """

    begin: int
    end: int
    kind: str
    steps: int
    ended: str = ""


def run_script(path: Path, arguments: Sequence[str], steps: int = DEFAULT_STEPS) -> tuple[Record, Window]:
    """Runs a script as `python PATH ARGUMENTS` would, until it has made so many optimizer steps.

    Raises:
        Exception: what the script raises before it has finished a step.
    """
    with _as_main(path, arguments):
        return _observed(lambda: runpy.run_path(str(path), run_name="__main__"), steps)


def run_function(fn: Callable[..., Any], arguments: Sequence[Any], steps: int = DEFAULT_STEPS) -> tuple[Record, Window]:
    """Calls a function so many times; each call is a step."""

    def repeat(record: Record, ends: list[int]) -> None:
        for _ in range(steps):
            fn(*arguments)
            torch.tpu.synchronize()  # type: ignore[attr-defined]
            ends.append(len(record.runs))

    record = Record()
    ends: list[int] = []
    with _observing(record):
        _know_modules(record, [fn, getattr(fn, "__self__", None), *arguments])
        repeat(record, ends)
        record.mark()
    return record, Window(ends[-2] if steps > 1 else 0, ends[-1], "call", steps)


def _know_modules(record: Record, values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, torch.nn.Module):
            record.modules.update(value.modules())
        elif isinstance(value, torch.optim.Optimizer):
            record.optimizers.add(value)


def _observed(run: Callable[[], Any], steps: int) -> tuple[Record, Window]:
    record = Record()
    ends: list[int] = []
    clock: list[int] = []

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        record.optimizers.add(optimizer)
        clock[:] = clock or [id(optimizer)]
        if id(optimizer) == clock[0]:
            record.mark()
            ends.append(len(record.runs))
            if len(ends) > steps:
                raise EnoughStepsError

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        record.optimizers.add(optimizer)
        record.mark()

    ended = ""
    kept: Any = None
    with _observing(record):
        hooks = [register_optimizer_step_pre_hook(stepping), register_optimizer_step_post_hook(stepped)]
        try:
            kept = run()
        except EnoughStepsError:
            ended = f"after {steps} optimizer steps"
        except SystemExit as stop:
            ended = f"with exit code {stop.code}" if stop.code else ""
        except Exception as error:
            if len(ends) < 2:
                raise
            ended = f"by {type(error).__name__}: {error}"
        finally:
            for hook in hooks:
                hook.remove()
        # What is still pending gets its roles; its programs come after the last step, where there is one.
        torch.tpu.synchronize()  # type: ignore[attr-defined]
        record.mark()
    del kept
    if len(ends) > 1:
        return record, Window(ends[-2], ends[-1], "training step", len(ends) - 1, ended)
    return record, _repetition(record, ended)


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, search = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


@contextlib.contextmanager
def _observing(record: Record) -> Iterator[None]:
    chosen = client()
    if not isinstance(chosen, TopologyClient):
        raise RuntimeError(
            "a plan needs a TPU that is not there, and the device has been started on another platform "
            f"({chosen.platform_name}). Call torch_tpu.plan before anything uses the device, or set "
            f"TORCH_TPU_PLATFORM (now {os.environ.get('TORCH_TPU_PLATFORM', 'auto')!r}) to the target."
        )

    def registered(module: torch.nn.Module, name: str, value: Any) -> None:
        record.modules.add(module)

    hooks = [
        registration.register_module_parameter_registration_hook(registered),
        registration.register_module_buffer_registration_hook(registered),
    ]
    chosen.observer = record
    try:
        yield
    finally:
        chosen.observer = None
        for hook in hooks:
            hook.remove()


def _repetition(record: Record, ended: str) -> Window:
    keys = [id(run.program) for run in record.runs]
    count = len(keys)
    recent = set(keys[count // 2 :])
    for period in range(1, count // 2 + 1):
        if keys[-period:] == keys[-2 * period : -period] and recent <= set(keys[-period:]):
            steps = 1
            while keys[count - (steps + 1) * period : count - steps * period] == keys[-period:]:
                steps += 1
            return Window(count - period, count, "repetition", steps, ended)
    made = [t.born + (t.program is not None) for t in record.things if t.role == PARAMETER]
    return Window(min(max(made, default=0), max(count - 1, 0)), count, "whole run", 1, ended)
