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

from torch_tpu import delayed, metrics
from torch_tpu.eager import hooks
from torch_tpu.hlo import strided, types
from torch_tpu.hlo.target import Target, builds_here
from torch_tpu.runtime import fingerprint
from torch_tpu.runtime.client import Executable, client
from torch_tpu.runtime.cpu_options import options_for
from torch_tpu.tensor.storage import Geometry, geometry

if TYPE_CHECKING:
    from torch_tpu.hlo import array as hlo
    from torch_tpu.hlo import guard, module
    from torch_tpu.hlo.array import Array
    from torch_tpu.ops.core import random_bits
    from torch_tpu.ops.tracing import moving_views, tracer
else:
    # Only to trace a call: a plan from the disk needs none of them.
    hlo = delayed.module("torch_tpu.hlo.array", globals(), "hlo")
    guard = delayed.module("torch_tpu.hlo.guard", globals(), "guard")
    module = delayed.module("torch_tpu.hlo.module", globals(), "module")
    random_bits = delayed.module("torch_tpu.ops.core.random_bits", globals(), "random_bits")
    moving_views = delayed.module("torch_tpu.ops.tracing.moving_views", globals(), "moving_views")
    tracer = delayed.module("torch_tpu.ops.tracing.tracer", globals(), "tracer")

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
        self.is_simple = len(results) == 1 and not writes and isinstance(returned, Fresh) and returned.contiguous
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


class _Builder:
    """Traces one Call; holds what the trace produced besides the program."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.parameters: list[tuple[str, int]] = []
        self.specs: list[module.Spec] = []
        for i, spec in enumerate(call.inputs):
            if spec.storage == i:
                self._parameter("base", i, (tuple(spec.geometry.sizes), spec.geometry.dtype))
        for i, spec in enumerate(call.inputs):
            if spec.starts:
                self._parameter("starts", i, ((spec.starts,), torch.int32))
        for i, value in enumerate(call.data):
            self._parameter("data", i, ((), data_dtype(value, call.wide)))
        for i, dtype in enumerate(call.hosts):
            self._parameter("host", i, ((), dtype))
        self._parameter("rng", 0, ((2,), torch.uint64))
        self.rng: random_bits.Rng | None = None

    def _parameter(self, kind: str, index: int, spec: module.Spec) -> None:
        self.parameters.append((kind, index))
        self.specs.append(spec)

    def body(self, *arrays: Array) -> Sequence[Array]:
        given = dict(zip(self.parameters, arrays, strict=True))

        def rng() -> random_bits.Rng:
            if self.rng is None:
                self.rng = random_bits.Rng(given["rng", 0])
            return self.rng

        self.tracer = traced = tracer.Tracer(rng=rng, checks=self.call.checks)
        self.bases: dict[int, tracer.Base] = {}
        self.tensors: list[torch.Tensor] = []
        storages: dict[int, torch.UntypedStorage] = {}
        moving = {spec.storage for spec in self.call.inputs if spec.starts}
        for i, spec in enumerate(self.call.inputs):
            if spec.storage == i:
                base = tracer.Base(given["base", i], spec.geometry.sizes, spec.geometry.strides, spec.geometry.dtype)
                self.bases[i] = base
                storages[i] = traced.add_storage(base, spec.nbytes)
            tensor = torch.empty(0, dtype=spec.dtype, device="meta")
            tensor.set_(storages[spec.storage], spec.offset, spec.sizes, spec.strides)
            if spec.conj:
                tensor = tensor.conj()
            if spec.storage in moving:
                traced.followed.add(tensor, _window(i, spec, self.bases[spec.storage], given.get(("starts", i))))
            self.tensors.append(tensor)
        hosts = []
        for i, dtype in enumerate(self.call.hosts):
            tensor = torch.empty((), dtype=dtype, device="meta")
            traced.add_host_scalar(tensor, given["host", i])
            hosts.append(tensor)
        data = [tracer.Data(value, given["data", i]) for i, value in enumerate(self.call.data)]
        table: dict[str, Sequence[Any]] = {"input": self.tensors, "host": hosts, "data": data}
        args, kwargs = fill((self.call.args, self.call.kwargs), table)
        self.returned = self.call.function(traced, args, kwargs)

        self.results: list[Array] = []
        self.fresh_index: dict[int, int] = {}
        self.tree = self._describe(self.returned)
        self.writes = []
        for i, base in self.bases.items():
            if base.written:
                g = geometry(base.sizes, base.strides, base.dtype)
                self.writes.append((i, len(self.results), g))
                self.results.append(self._written(base, self.call.inputs[i].geometry, given["base", i]))
        self.check_slots = []
        for condition, message, error, value in traced.checks:
            slot = len(self.results)
            self.check_slots.append((slot, message, error, None if value is None else slot + 1))
            self.results.extend([condition] if value is None else [condition, value])
        return self.results

    def _written(self, base: tracer.Base, g: Geometry, old: Array) -> Array:
        """The new value of a storage; the old one where a condition does not hold and only the program can choose."""
        new = base.value()
        conditions = [condition for condition, *_ in self.tracer.checks]
        if not conditions or new.size != old.size or new.dtype is not old.dtype:
            return new
        if new.shape != old.shape or base.strides != g.strides:
            # The same memory, with its dimensions in another order.
            old = strided.read(old, *strided.plan(g.sizes, g.strides, base.sizes, base.strides, 0, g.dtype, base.dtype))
        elif self.call.guarded:
            return guard.kept_unless(conditions, new, old)
        elif any(True for _ in old.value.uses):
            return new  # the old value is an argument, so whoever runs the program can choose
        for condition in conditions:
            new = hlo.select(condition, new, old)
        return new

    def _source(self, returned: torch.Tensor) -> int | None:
        """The input that a tensor is a view of."""
        window = self.tracer.followed.window(returned)
        if window is not None:
            return window.index
        storage = returned.untyped_storage()
        for i, tensor in enumerate(self.tensors):
            if tensor.untyped_storage()._cdata == storage._cdata:
                self.tracer.followed.lost |= self.tracer.followed.moves(storage)
                return i
        return None

    def _describe(self, returned: Any) -> Any:
        if not isinstance(returned, torch.Tensor):
            if isinstance(returned, (list, tuple)):
                described = [self._describe(r) for r in returned]
                return described if isinstance(returned, list) else tuple(described)
            return returned
        for i, tensor in enumerate(self.tensors):
            if tensor is returned:
                return Alias(i, True)
        place = (tuple(returned.shape), returned.stride(), int(returned.storage_offset()))
        source = self._source(returned)
        if source is not None:
            begins, own = (int(t.storage_offset()) * t.itemsize for t in (self.tensors[source], returned))
            return Alias(source, False, *place[:2], own - begins, returned.dtype)
        base = self.tracer.base(returned)
        if id(base) not in self.fresh_index:
            self.fresh_index[id(base)] = len(self.results)
            self.results.append(base.value())
        g = geometry(base.sizes, base.strides, base.dtype)
        whole = returned.numel() * returned.element_size() == g.nbytes
        contiguous = whole and returned.stride() == strided.contiguous_strides(returned.shape)
        return Fresh(self.fresh_index[id(base)], g, *place, returned.dtype, contiguous)


def _window(index: int, spec: Input, base: tracer.Base, starts: Array | None) -> moving_views.Window:
    steps, first = strided.plan(base.sizes, base.strides, spec.sizes, spec.strides, spec.offset, base.dtype, spec.dtype)
    given = (
        first if starts is None else [hlo.reshape(hlo.slice_in_dim(starts, k, k + 1), ()) for k in range(len(first))]
    )
    return moving_views.Window(index, spec.sizes, spec.dtype, (steps, given))


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


def _named(name: str, body: Callable[..., Sequence[Array]]) -> Callable[..., Sequence[Array]]:
    """`body`, whose operations are to say which operator they come from where the client wants that."""
    if not client().names_operators:
        return body

    def build(*arrays: Array) -> Sequence[Array]:
        with module.named(name):
            return body(*arrays)

    return build


def new_target(platform: str | None = None) -> Target:
    """The target of a module for this process's client, or for another platform, by PJRT's name, without LAPACK."""
    if platform is not None:
        return Target(platform, lapack=False)
    return Target(client().platform_name, client().calls_lapack)


def make_plan(call: Call, platform: str | None = None) -> Plan:
    """Traces a call; raises what PyTorch raises for wrong arguments, and NoLowering.

    Args:
        platform: what the program is for, by PJRT's name; the client's by default.
    """
    with module.building, metrics.timed("trace_seconds"):
        builder = _Builder(call)
        target = new_target(platform)
        built, results = module.build(call.name, target, builder.specs, _named(call.name, builder.body))
        used = module.drop_unused_parameters(built)
        operations = module.operations(built)
    arguments = [p for p, is_used in zip(builder.parameters, used, strict=True) if is_used]
    metrics.count("program")
    return Plan(
        call.name,
        built,
        [spec for spec, is_used in zip(builder.specs, used, strict=True) if is_used],
        results,
        operations,
        target,
        bases=tuple(i for kind, i in arguments if kind == "base"),
        starts=tuple((i, call.inputs[i].starts) for kind, i in arguments if kind == "starts"),
        data=tuple((i, data_dtype(call.data[i], call.wide)) for kind, i in arguments if kind == "data"),
        hosts=tuple((i, call.hosts[i]) for kind, i in arguments if kind == "host"),
        for_offsets=builder.tracer.followed.lost,
        uses_rng=("rng", 0) in arguments,
        draws=builder.rng.drawn if builder.rng is not None else 0,
        writes=tuple(builder.writes),
        checks=tuple(builder.check_slots),
        guarded=call.guarded,
        returned=builder.tree,
    )
