"""Runs an unchanged script, or calls a function, on a topology, and finds its steps.

A training step ends with a step of the first optimizer; it begins behind the one before, or where the model is called
for training again after it was called in evaluation mode. Without an optimizer a step is a call of an outermost module
without gradients, after which recorded operators are run; else the shortest sequence of programs that repeats at the
end and leaves out none that ran in the second half; else everything after the parameters were made. Programs of the
last step count; those before are set-up.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as registration

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function
from torch_tpu.patching.patch_registry import Moment, optional
from torch_tpu.planner.recorder import PARAMETER, Record
from torch_tpu.runtime.process_client import client
from torch_tpu.runtime.topology import TopologyClient

DEFAULT_STEPS = 3


# Dynamo traces hooks of modules, and would break the graph at a function of this package.
_HOOKS = """
def entered(module, arguments):
    if not is_compiling():
        enter(module)

def left(module, arguments, result):
    if not is_compiling():
        leave(module)
"""


@optional(
    "plan: steps",
    "`torch-tpu plan` finds the steps of a script by its optimizers and modules",
    function("torch.optim.optimizer:register_optimizer_step_pre_hook", "hook"),
    function("torch.optim.optimizer:register_optimizer_step_post_hook", "hook"),
    function("torch.nn.modules.module:register_module_forward_pre_hook", "hook"),
    function("torch.nn.modules.module:register_module_forward_hook", "hook", "always_call"),
    moment=Moment.CALL,
)
def watch_steps(changes: Changes, stepping: Any, stepped: Any, entered: Any, left: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    changes.on_undo(register_optimizer_step_pre_hook(stepping).remove)
    changes.on_undo(register_optimizer_step_post_hook(stepped).remove)
    changes.on_undo(registration.register_module_forward_pre_hook(entered).remove)
    changes.on_undo(registration.register_module_forward_hook(left, always_call=True).remove)


@optional(
    "plan: modules",
    "`torch-tpu plan` knows which tensors are a script's weights",
    function("torch.nn.modules.module:register_module_parameter_registration_hook", "hook"),
    function("torch.nn.modules.module:register_module_buffer_registration_hook", "hook"),
    moment=Moment.CALL,
)
def watch_modules(changes: Changes, registered: Any) -> None:
    changes.on_undo(registration.register_module_parameter_registration_hook(registered).remove)
    changes.on_undo(registration.register_module_buffer_registration_hook(registered).remove)


class EnoughStepsError(BaseException):
    """Ends a script whose steps have been seen; no script catches it by accident."""


@dataclass(frozen=True)
class StepWindow:
    """The last step: its programs, from `begin` up to `end`.

    Attributes:
        kind: "training step", "call of <module>", "call", "repetition" or "whole run".
        steps: how many there were.
        ended: why the script did not run to its end; empty where it did.
        reads: which of the host's reads belong to it; None where those do that come before its end.
    """

    begin: int
    end: int
    kind: str
    steps: int
    ended: str = ""
    reads: range | None = None


def run_script(path: Path, arguments: Sequence[str], steps: int = DEFAULT_STEPS) -> tuple[Record, StepWindow]:
    """Runs a script as `python PATH ARGUMENTS` would, until it has made so many optimizer steps.

    Raises:
        Exception: what the script raises before it has finished a step.
    """
    with _as_main(path, arguments):
        return _observed(lambda: runpy.run_path(str(path), run_name="__main__"), steps)


def run_function(
    fn: Callable[..., Any], arguments: Sequence[Any], steps: int = DEFAULT_STEPS
) -> tuple[Record, StepWindow]:
    """Calls a function so many times; each call is a step."""
    record = Record()
    ends: list[int] = [0]
    with _observing(record):
        _know_modules(record, [fn, getattr(fn, "__self__", None), *arguments])
        # Its calls are the steps, whatever optimizers and modules do inside of them.
        with _Steps(record, sys.maxsize).noted():
            for _ in range(steps):
                fn(*arguments)
                torch.tpu.synchronize()  # type: ignore[attr-defined]
                ends.append(len(record.runs))
        record.mark()
    return record, StepWindow(ends[-2], ends[-1], "call", steps)


def _know_modules(record: Record, values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, torch.nn.Module):
            record.modules.update(value.modules())
        elif isinstance(value, torch.optim.Optimizer):
            record.optimizers.add(value)


class _Moment(NamedTuple):
    """So many programs have run, and the host has read so often."""

    runs: int
    reads: int


class _Steps:
    """Notes where steps end, and ends the script after enough of them."""

    def __init__(self, record: Record, enough: int) -> None:
        self.record = record
        self.enough = enough
        # Where each training step begins and ends.
        self.begun: list[_Moment] = []
        self.trained: list[_Moment] = []
        self.called: list[int] = []
        self.callee = ""
        self._first: int | None = None
        self._depth = 0
        self._begin = _Moment(0, 0)
        self._between = True

    def stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.record.optimizers.add(optimizer)
        self.record.mark()

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) == self._first:
            torch.tpu.synchronize()  # type: ignore[attr-defined]
            self.record.mark()
            self.begun.append(self._begin)
            self._begin = self._now()
            self.trained.append(self._begin)
            if len(self.trained) > self.enough:
                raise EnoughStepsError

    def enter(self, module: torch.nn.Module) -> None:
        if not self._depth and self._between and torch.is_grad_enabled() and module.training:
            torch.tpu.synchronize()  # type: ignore[attr-defined]
            self.record.mark()
            self._between, self._begin = False, self._now()
        self._depth += 1

    def leave(self, module: torch.nn.Module) -> None:
        self._depth -= 1
        if not self._depth and self.trained and not torch.is_grad_enabled() and not module.training:
            self._between = self._between or self._is_trained(module)
        if self._depth or torch.is_grad_enabled() or self.trained:
            return
        torch.tpu.synchronize()  # type: ignore[attr-defined]
        self.record.mark()
        if len(self.record.runs) > (self.called[-1] if self.called else 0):
            self.called.append(len(self.record.runs))
            self.callee = type(module).__name__
            if len(self.called) > self.enough and self._repeats() and not _some_optimizer():
                raise EnoughStepsError

    def _now(self) -> _Moment:
        return _Moment(len(self.record.runs), len(self.record.reads))

    def _is_trained(self, module: torch.nn.Module) -> bool:
        """Whether the optimizer changes it: a teacher, called in evaluation mode too, is part of the step."""
        known = {
            id(p) for optimizer in self.record.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        return any(id(p) in known for p in module.parameters())

    def _repeats(self) -> bool:
        before, last, now = self.called[-3:]
        keys = [id(run.program) for run in self.record.runs[before:now]]
        return keys[: last - before] == keys[last - before :]

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        functions: dict[str, Any] = {
            "is_compiling": torch.compiler.is_compiling,
            "enter": self.enter,
            "leave": self.leave,
        }
        exec(compile(_HOOKS, "<hooks of a plan>", "exec"), functions)
        with (
            watch_steps.during(self.stepping, self.stepped, functions["entered"], functions["left"]),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
            yield

    def window(self, ended: str) -> StepWindow:
        if self.trained:
            steps = max(len(self.trained) - 1, 1)
            begin, end = self.begun[-1], self.trained[-1]
            return StepWindow(begin.runs, end.runs, "training step", steps, ended, range(begin.reads, end.reads))
        if len(self.called) > 1:
            return StepWindow(self.called[-2], self.called[-1], f"call of {self.callee}", len(self.called), ended)
        return _repetition(self.record, ended)


def _some_optimizer() -> bool:
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())


def _observed(run: Callable[[], Any], enough: int) -> tuple[Record, StepWindow]:
    record = Record()
    steps = _Steps(record, enough)
    ended = ""
    kept: Any = None
    with _observing(record):
        try:
            with steps.noted(), write_no_stand_ins.during(record):
                kept = run()
        except EnoughStepsError:
            ended = f"after {enough} steps"
        except SystemExit as stop:
            if stop.code and len(steps.trained) < 2 and len(steps.called) < 2:
                raise
            ended = f"with exit code {stop.code}" if stop.code else ""
        except Exception as error:
            if len(steps.trained) < 2 and len(steps.called) < 2:
                raise
            ended = f"by {type(error).__name__}: {error}"
        # What is still pending gets its roles; its programs come after the last step, where there is one.
        torch.tpu.synchronize()  # type: ignore[attr-defined]
        record.mark()
    del kept
    return record, steps.window(ended)


@optional(
    "plan: checkpoints",
    "`torch-tpu plan` does not write checkpoints: they would hold placeholder values instead of trained weights",
    function("torch:save", "obj", "f"),
    moment=Moment.CALL,
)
def write_no_stand_ins(changes: Changes, record: Record) -> None:
    # Only once something ran: before, a script writes what it has made itself.
    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(values: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            if not record.runs or not isinstance(file, (str, os.PathLike)):
                return original(values, file, *args, **kwargs)
            why = "its tensors have placeholder values"
            print(f"torch-tpu plan does not write {os.fspath(file)}: {why}", file=sys.stderr)
            return None

        return save

    changes.set(torch, "save", instead(torch.save))
    safetensors = _safetensors()
    if hasattr(safetensors, "save_file"):
        changes.set(safetensors, "save_file", instead(safetensors.save_file))


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        return None


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
            "A plan needs a TPU topology, but the device has already been started on another platform "
            f"({chosen.platform_name}). Call torch_tpu.plan before anything uses the device, or set "
            f"TORCH_TPU_PLATFORM (now {os.environ.get('TORCH_TPU_PLATFORM', 'auto')!r}) to the target."
        )

    def registered(module: torch.nn.Module, name: str, value: Any) -> None:
        record.modules.add(module)

    chosen.listener = record
    try:
        with watch_modules.during(registered):
            yield
    finally:
        chosen.listener = None


def _repetition(record: Record, ended: str) -> StepWindow:
    keys = [id(run.program) for run in record.runs]
    count = len(keys)
    recent = set(keys[count // 2 :])
    for period in range(1, count // 2 + 1):
        if keys[-period:] == keys[-2 * period : -period] and recent <= set(keys[-period:]):
            steps = 1
            while keys[count - (steps + 1) * period : count - steps * period] == keys[-period:]:
                steps += 1
            return StepWindow(count - period, count, "repetition", steps, ended)
    made = [t.born + (t.program is not None) for t in record.things if t.role == PARAMETER]
    return StepWindow(min(max(made, default=0), max(count - 1, 0)), count, "whole run", 1, ended)
