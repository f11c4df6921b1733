"""A plan: the program of one operator signature, and how its results become tensors.

A plan is made by tracing the operator once on meta tensors (`ops.tracing.tracer`), and found again by signature. It
knows nothing of particular tensors: strict modes compile and run it by itself, fused mode makes it part of bigger
programs.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from torch_tpu import delayed, hooks
from torch_tpu.hlo import types
from torch_tpu.hlo.target import Target, builds_here
from torch_tpu.runtime import fingerprint
from torch_tpu.runtime.client import Executable
from torch_tpu.runtime.cpu_options import options_for
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import Geometry

if TYPE_CHECKING:
    from torch_tpu.hlo import module
else:
    # A plan from the disk needs it only to be part of a bigger program.
    module = delayed.module("torch_tpu.hlo.module", globals(), "module")

hooks.traces = builds_here


@dataclass(frozen=True)
class Input:
    """A tensor argument as the program sees it.

    Attributes:
        geometry: of the value its storage holds.
        storage: the index of the first input that shares its storage.
        starts: how many slice starts of its view are inputs of the program.
    """

    geometry: Geometry
    nbytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    starts: int
    conj: bool


@dataclass
class Call:
    """Everything a program depends on: the function, its arguments with placeholders for what is data.

    Attributes:
        identity: the same for the same function in any process; empty where there is no such name.
        func: the operator, if it is a call of one.
    """

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Input]
    data: list[bool | int | float | complex]
    hosts: list[torch.dtype]
    wide: bool
    checks: bool
    guarded: bool = False
    identity: str = ""
    func: OpOverload | None = None


class Slot:
    """Placeholder in a Call's arguments: entry `index` of its inputs, data or host scalars."""

    __slots__ = ("index", "kind")

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index

    def __repr__(self) -> str:
        return f"Slot({self.kind}, {self.index})"


@dataclass(frozen=True)
class Fresh:
    """A new tensor: which program result its storage holds, and where in that storage it lies.

    Attributes:
        contiguous: it is all its storage holds, in row-major order.
    """

    result: int
    geometry: Geometry
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    contiguous: bool


@dataclass(frozen=True)
class Alias:
    """A view of input `input`'s storage; the input itself where `same`.

    Attributes:
        offset: in bytes, from where the input begins.
    """

    input: int
    same: bool
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


class Plan:
    """A program, where its arguments come from and what becomes of its results.

    Attributes:
        number: unique in this process.
        digest: equal for equal programs, in any process.
        module: its StableHLO; `operations` are those it consists of, `custom_calls` the functions it calls.
        no_slots: a None for each result.
        values, numbers, results: the shapes and dtypes of its parameters that are values, of the others, and of what
            it returns.
        bases, starts, data, hosts: which of a call's input values, view starts, numbers and host scalars are arguments,
            in this order; then the random state if `uses_rng`.
        for_offsets: the program is right only where its views start at the offsets of the call it was made for.
        sizes, nbytes: the bytes of each result, and of all.
        draws: by how many 32-bit words the program advances the random generator.
        writes: (input, result, geometry): the new value of an input's storage.
        checks: (result, message, error, result for the message's {}): what must hold before anything is written.
        guarded: the program itself writes old values where one of the checks does not hold.
        updated: the inputs whose new value is computed from the old one.
        reused: (argument, input, result): arguments whose memory the program gives to the value written to the input.
            Called by itself it takes their buffers, which nobody else may hold.
        returned: what the call returns, with Fresh and Alias in place of tensors.
        ranks: those that run the program together; none where it doesn't communicate. It is part of no other program.
        reads_precision: PyTorch's precision of float32 products had a say in the program.
        is_simple: that is the only result as a contiguous tensor, and nothing is written.
        call: what it was made of, kept while it is not known whether the compiler has code for it.
    """

    __slots__ = (
        "_module",
        "bases",
        "call",
        "checks",
        "custom_calls",
        "data",
        "digest",
        "draws",
        "executable",
        "for_offsets",
        "guarded",
        "hosts",
        "is_simple",
        "name",
        "nbytes",
        "no_slots",
        "number",
        "numbers",
        "operations",
        "ranks",
        "reads_precision",
        "results",
        "returned",
        "reused",
        "sizes",
        "starts",
        "updated",
        "uses_rng",
        "values",
        "writes",
    )
    _numbers = itertools.count()

    def __init__(
        self,
        name: str,
        built: Any,
        parameters: Sequence[module.Spec],
        results: list[module.Spec],
        operations: Counter[tuple[str, tuple[int, ...]]],
        target: Target,
        *,
        bases: tuple[int, ...],
        starts: tuple[tuple[int, int], ...],
        data: tuple[tuple[int, torch.dtype], ...],
        hosts: tuple[tuple[int, torch.dtype], ...],
        for_offsets: bool,
        uses_rng: bool,
        draws: int,
        writes: tuple[tuple[int, int, Geometry], ...],
        checks: tuple[tuple[int, str, type[Exception], int | None], ...],
        guarded: bool,
        returned: Any,
        digest: int | None = None,
    ) -> None:
        """`built` is a module, or as bytecode what `code` gave of another plan, whose `digest` is this one's too."""
        self.number = next(self._numbers)
        self.name = name
        self._module: Any = built
        self.digest = zlib.crc32(str(built).encode()) if digest is None else digest
        self.values = tuple(parameters[: len(bases)])
        self.numbers = tuple(parameters[len(bases) :])
        self.results = results
        self.sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in results]
        self.nbytes = sum(self.sizes)
        self.no_slots = (None,) * len(results)
        self.operations = operations
        self.custom_calls = target.custom_calls
        self.reads_precision = target.reads_precision
        self.ranks = target.ranks
        self.bases = bases
        self.starts = starts
        self.data = data
        self.hosts = hosts
        self.for_offsets = for_offsets
        self.uses_rng = uses_rng
        self.draws = draws
        self.writes = writes
        self.checks = checks
        self.guarded = guarded
        self.updated = tuple(i for i, *_ in writes if i in bases)
        # Without `guarded`, old values are still needed when a check turns out not to hold.
        self.reused = tuple(
            (bases.index(i), i, result)
            for i, result, _ in writes
            if i in bases and self.values[bases.index(i)] == results[result] and (guarded or not checks)
        )
        if digest is None:
            module.reuse_parameters(built, [(argument, result) for argument, _, result in self.reused])
        self.returned = returned
        self.is_simple = (
            len(results) == 1 and not self.ranks and not writes and isinstance(returned, Fresh) and returned.contiguous
        )
        self.executable: Executable | None = None
        self.call: Call | None = None

    def code(self) -> bytes:
        """Its module as bytecode."""
        return self._module if isinstance(self._module, bytes) else fingerprint.bytecode(self._module)

    @property
    def module(self) -> Any:
        if isinstance(self._module, bytes):
            self._module = module.parse(self._module)
        return self._module

    def compiled(self) -> Executable:
        """The program by itself, compiled when first asked for."""
        if self.executable is None:
            self.executable = client().compile(
                self._module,
                [(shape, types.numpy_dtype(dtype)) for shape, dtype in self.results],
                options=options_for(self.operations) if client().runs_on_cpu else None,
                custom_calls=self.custom_calls,
                ranks=self.ranks,
            )
        return self.executable


def data_dtype(value: bool | int | float | complex, wide: bool) -> torch.dtype:
    """The dtype in which a number enters a program: float32 unless the program computes in float64."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64 if value < 2**63 else torch.uint64
    if isinstance(value, float):
        return torch.float64 if wide else torch.float32
    return torch.complex128 if wide else torch.complex64


def fill(value: Any, table: dict[str, Sequence[Any]]) -> Any:
    """Arguments of a Call with what `table` has for each of their Slots, by kind and index."""
    if isinstance(value, Slot):
        return table[value.kind][value.index]
    if isinstance(value, (list, tuple)):
        filled = [fill(v, table) for v in value]
        return tuple(filled) if isinstance(value, tuple) else filled
    if isinstance(value, dict):
        return {k: fill(v, table) for k, v in value.items()}
    return value


def new_target(platform: str | None = None) -> Target:
    """The target of a module for this process's client, or for another platform, by PJRT's name, without LAPACK."""
    if platform is not None:
        return Target(platform, lapack=False)
    return Target(client().platform_name, client().calls_lapack)


# For each number parameter of a plan the numbers given for it; None for a plan without such parameters.
ScalarArguments = Sequence[Sequence[Any]] | None
