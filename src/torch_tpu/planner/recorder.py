"""Records what a script would do on the device: programs, the values they make, how long each lives, and its role.

Time is counted in programs: a value is born with the program that makes it (or before the next one, where the host
wrote it) and dies before a later one. A placeholder lives exactly as long as the buffer it stands for would.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_tpu import metrics
from torch_tpu.metrics import user_lines
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.topology import AheadOfTimeProgram, Placeholder
from torch_tpu.tensor.storage import Value

PARAMETER, GRADIENT, STATE, INPUT, OTHER = "parameters", "gradients", "optimizer state", "inputs", "activations"
ROLES = (PARAMETER, GRADIENT, STATE, INPUT, OTHER)
# A written scalar or vector of fewer bytes is a number, a seed or where slices start, and no input.
SMALLEST_INPUT = 64


@dataclass(eq=False)
class Thing:
    """A value on the device.

    Attributes:
        program, result: what made it; None where the host wrote it, then at `place`.
        born, died: in programs; `died` is None while it lives.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    born: int
    role: str = OTHER
    program: AheadOfTimeProgram | None = None
    result: int = 0
    place: str = ""
    died: int | None = None


@dataclass(frozen=True)
class Run:
    """A program that would have run."""

    program: AheadOfTimeProgram
    arguments: tuple[Thing, ...]
    results: tuple[Thing, ...]


@dataclass(frozen=True)
class HostRead:
    """The host reads a value, after so many programs."""

    after: int
    place: str
    nbytes: int
    fallback: bool


class Record:
    """The listener of a topology's client.

    Attributes:
        runs, reads: in their order.
        things: every value that ever was.
        written: those the host wrote, such as a batch.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.reads: list[HostRead] = []
        self.things: list[Thing] = []
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._donations: dict[AheadOfTimeProgram, tuple[int, ...]] = {}
        self._pending: dict[int, tuple[weakref.ref[Value], str]] = {}
        self._living: dict[int, Thing] = {}
        self._references: dict[int, weakref.ref[Placeholder]] = {}

    # --- what the client tells ---

    def put(self, buffer: Placeholder) -> None:
        thing = self._born(buffer)
        if len(thing.shape) > 1 or thing.nbytes >= SMALLEST_INPUT:
            thing.place = user_lines.where(user_lines.here_or_backward())
            thing.role = INPUT

    def ran(self, program: AheadOfTimeProgram, arguments: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        self.mark()
        given = tuple(self._living.get(id(a)) or self._born(a) for a in arguments)
        made = []
        for n, buffer in enumerate(results):
            thing = self._born(buffer)
            thing.program, thing.result = program, n
            made.append(thing)
        for n in self._donated(program):
            given[n].died = len(self.runs) + 1  # its memory is that of a result now
        self.runs.append(Run(program, given, tuple(made)))

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Zeros, which take no real memory (a flag is False, an index 0), but 1.0 for a single float, such as a loss.

        Scripts divide by it, take its logarithm, or stop where it is small.
        """
        aval = buffer.aval
        fallback = metrics.waited_for() == "operator on the CPU"
        place = user_lines.where(user_lines.here_or_backward())
        self.reads.append(HostRead(len(self.runs), place, aval.size * aval.dtype.itemsize, fallback))
        if aval.size == 1 and "float" in aval.dtype.name and not _by_grad_scaler():
            return np.ones(aval.shape, aval.dtype)
        return np.zeros(aval.shape, aval.dtype)

    def _donated(self, program: AheadOfTimeProgram) -> tuple[int, ...]:
        if program not in self._donations:
            self._donations[program] = tuple(_donated(program))
        return self._donations[program]

    def _born(self, buffer: Placeholder) -> Thing:
        aval = buffer.aval
        thing = Thing(tuple(aval.shape), aval.dtype.name, aval.size * aval.dtype.itemsize, len(self.runs))
        self.things.append(thing)
        key = id(buffer)
        self._living[key] = thing

        def died(reference: Any) -> None:
            if thing.died is None:
                thing.died = len(self.runs)
            if self._living.get(key) is thing:
                del self._living[key], self._references[key]

        self._references[key] = weakref.ref(buffer, died)
        return thing

    # --- what values are ---

    def mark(self) -> None:
        """Gives the values of parameters, gradients and optimizer states their role."""
        for key, (reference, role) in list(self._pending.items()):
            value = reference()
            if value is None or self._is_value(value, role):
                del self._pending[key]
        for module in list(self.modules):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._is(parameter, PARAMETER)
                    if parameter.grad is not None:
                        self._is(parameter.grad, GRADIENT)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._is(buffer, PARAMETER)
        for optimizer in list(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._is(parameter, PARAMETER)
                    if parameter.grad is not None:
                        self._is(parameter.grad, GRADIENT)
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        self._is(value, STATE)

    def _is(self, tensor: torch.Tensor, role: str) -> None:
        if tensor.device.type != "tpu" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        value: Value | None = getattr(tensor.untyped_storage(), "value", None)
        if value is not None and not self._is_value(value, role):
            # By the time it is computed the tensor may have another one.
            self._pending[id(value)] = (weakref.ref(value), role)

    def _is_value(self, value: Value, role: str) -> bool:
        """Whether the value was there to be given a role."""
        if getattr(value, "graph", None) is not None:
            return False
        thing = self._living.get(id(value.array))
        if thing is not None and thing.role in (OTHER, INPUT):
            thing.role = role
        return True

    def living(self, during: int) -> Iterable[Thing]:
        """What lies in memory while a program runs, its arguments and results included."""
        return (t for t in self.things if t.born <= during and (t.died is None or t.died > during))


def _by_grad_scaler() -> bool:
    """Whether `GradScaler` reads, which asks for a float that says whether a gradient was infinite: 0.0 means no."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch_tpu."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.amp.grad_scaler"


_PLACE = re.compile(r'"([^"]*)"')


def _main(program: AheadOfTimeProgram) -> Any:
    functions = program.module.body.operations
    return next(f.operation for f in functions if f.operation.attributes["sym_name"].value == "main")


def _donated(program: AheadOfTimeProgram) -> Iterator[int]:
    """Which arguments give their memory to a result."""
    attributes = _main(program).attributes
    if "arg_attrs" in attributes:
        yield from (n for n, given in enumerate(attributes["arg_attrs"]) if "tf.aliasing_output" in given)


def places_of_results(program: AheadOfTimeProgram) -> list[str]:
    """Where in the user's program each result of a program is made, by the names in its module."""
    returned = list(_main(program).regions[0].blocks[0].operations)[-1]
    found = []
    for operand in returned.operands:
        owner = operand.owner
        name = _PLACE.search(str(getattr(owner, "location", "")))
        found.append(name[1] if name else "")
    return found
