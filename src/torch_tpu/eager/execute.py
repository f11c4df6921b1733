"""Runs plans: finds or makes the plan of a call, gathers its arguments, and turns results into tensors.

`submit` is the seam between recording and running. Strict modes run each plan at once; fused mode puts the plan and its
input values into this thread's graph (`defer`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_tpu import metrics
from torch_tpu.eager import chunk, described, graph, hooks, mode, refused, stored_plans
from torch_tpu.eager.conditions import Write
from torch_tpu.eager.graph import Pending
from torch_tpu.eager.plan import Alias, Call, Fresh, Input, Plan, Slot, make_plan
from torch_tpu.eager.recent import Recent
from torch_tpu.hlo import strided, types
from torch_tpu.metrics import programs
from torch_tpu.ops.derived import IsData
from torch_tpu.runtime import client as runtime_client
from torch_tpu.runtime.client import Buffer, client, client_errors, launch
from torch_tpu.tensor.errors import check_fits, device_mismatch, translate
from torch_tpu.tensor.storage import (
    UNSHARED,
    Content,
    Geometry,
    Taken,
    Value,
    Writing,
    new_contiguous,
    new_storage,
    publishing,
    references,
    value_of,
    view,
)
from torch_tpu.tensor.transfer import contents, is_true, to_numpy

_matmul_precision = torch._C._get_float32_matmul_precision
_default_dtype = torch.get_default_dtype
_WIDE = frozenset({torch.float64, torch.complex128})
_Tensor = torch.Tensor
LAST_INT64 = 2**63 - 1

# Plan or Unsupported by signature. Forgetting a plan also frees its executable.
MOST_PLANS = 16384
_plans = Recent(MOST_PLANS)
# Those of simple calls once more, by shorter keys (`eager.simple`).
simple_plans = Recent(MOST_PLANS)
_making = threading.RLock()
_counters = metrics.counts.counters


@dataclass(frozen=True)
class Unsupported:
    """In place of a plan: a call that no program can express, and why."""

    reason: str


class ViewKind:
    """A way to view values of one geometry, up to where its slices start. Interned: compared by identity."""

    __slots__ = ()


class Starts(tuple[int, ...]):
    """Where the slices of a view start, which follows from its offset."""

    offset: int


_views = Recent(16384)
_view_kinds = Recent(16384)


def _view(g: Geometry, t: torch.Tensor) -> tuple[ViewKind, Starts]:
    key = (g, t.shape, t.stride(), t.storage_offset(), t.dtype)
    found: tuple[ViewKind, Starts] | None = _views.find(key)
    if found is None:
        steps, moving = strided.plan(
            tuple(g.sizes), g.strides, tuple(t.shape), t.stride(), int(t.storage_offset()), g.dtype, t.dtype
        )
        starts = Starts(moving)
        starts.offset = int(t.storage_offset())
        with _making:
            of_kind = (g, t.shape, t.stride(), t.dtype, steps)
            kind = _view_kinds.find(of_kind) or _view_kinds.keep(of_kind, ViewKind())
        found = _views.keep(key, (kind, starts))
    return found


class CallSignature:
    """Collects what a call's plan depends on (`key`) and what it only takes as data."""

    __slots__ = ("data", "hosts", "key", "starts", "storages", "tensors", "values")

    # Slice starts of the tensors that are views with such, by position.
    starts: dict[int, Starts]

    def __init__(self, key: list[Any]) -> None:
        self.key = key
        self.tensors: list[torch.Tensor] = []
        self.values: list[Content] = []
        self.storages: list[Any] = []
        self.starts = {}
        self.data: list[Any] = []
        self.hosts: list[torch.Tensor] = []

    def arguments(self, given: Iterable[Any], data: Iterable[IsData]) -> None:
        """Arguments of an operator. This runs for every call, which is why it calls so little."""
        key, tensors, values, storages = self.key, self.tensors, self.values, self.storages
        for t, is_data in zip(given, data):  # noqa: B905  (defaults are left out, and `strict` costs time)
            if not isinstance(t, _Tensor):
                if is_data is True and t.__class__ is float:
                    key.append(float)
                    self.data.append(t)
                else:
                    self.argument(t, is_data)
                continue
            storage = t.untyped_storage()
            try:
                value = storage.value  # type: ignore[attr-defined]
            except AttributeError:
                if not t.is_tpu:  # type: ignore[attr-defined]
                    self._host(t)
                    continue
                value = value_of(storage)
            g = value.geometry
            if t.shape == g.sizes and t.stride() == g.strides and t.dtype is g.dtype and not t.storage_offset():
                key.append(g)
            else:
                kind, self.starts[len(tensors)] = _view(g, t)
                key.append(kind)
            if g.is_complex and t.is_conj():
                # Matrix products get conjugated views as they are; for other operators PyTorch resolves the bit first.
                key.append("conj")
            tensors.append(t)
            values.append(value)
            storages.append(storage)

    def _host(self, t: torch.Tensor) -> None:
        if t.device.type != "cpu" or t.dim():
            raise device_mismatch(t)
        self.key.append(t.dtype)
        self.hosts.append(t)

    def argument(self, value: Any, is_data: IsData) -> None:
        """Any argument: a tensor, a number that is data, or part of the program."""
        if isinstance(value, _Tensor):
            self.arguments((value,), (False,))
        elif isinstance(value, (list, tuple)):
            self.key.append(len(value))
            for item in value:
                self.argument(item, is_data)
        elif is_data and isinstance(value, (int, float, complex)) and (is_data is True or is_data(value)):
            self.key.append("uint64" if value.__class__ is int and value > LAST_INT64 else type(value))
            self.data.append(value)
        elif isinstance(value, (float, complex, bool)):
            # Equal keys are not enough: 1 == 1.0 == True, 0.0 == -0.0, nan != nan.
            self.key.append(type(value))
            self.key.append(repr(value))
        elif isinstance(value, torch._C.Generator):
            self.key.append(None)
        else:
            self.key.append(value)

    def finish(self) -> tuple[Any, ...]:
        """Adds which tensors share a storage, and PyTorch's settings that decide results."""
        key, storages = self.key, self.storages
        if len(storages) == 2:
            if storages[0] is storages[1]:
                key.append((0, 0))
        elif len(storages) > 2:
            ids = [id(s) for s in storages]
            if len(set(ids)) != len(ids):
                key.append(tuple(ids.index(i) for i in ids))
        key.append(_matmul_precision())
        key.append(_default_dtype())
        return tuple(key)

    def inputs(self) -> list[Input]:
        ids = [id(s) for s in self.storages]
        result = []
        for n, (t, v, s) in enumerate(zip(self.tensors, self.values, self.storages, strict=True)):
            result.append(
                Input(
                    v.geometry,
                    s.nbytes(),
                    tuple(t.shape),
                    t.stride(),
                    int(t.storage_offset()),
                    t.dtype,
                    ids.index(id(s)),
                    len(self.starts.get(n, ())),
                    t.is_conj(),
                )
            )
        return result


class ForOffsets:
    """In place of a plan: calls that need another program where a view starts at another offset."""

    __slots__ = ()

    @staticmethod
    def key(key: tuple[Any, ...], sig: CallSignature) -> tuple[Any, ...]:
        """The key of a call's plan."""
        return (*key, *(sig.starts[i].offset for i in sorted(sig.starts)))


def known_plan(key: tuple[Any, ...], sig: CallSignature) -> Any:
    """The plan of a signature that was met before, or what stands in its place; None if it was not."""
    plan = _plans.get(key) or _plans.find(key)
    if plan.__class__ is ForOffsets:
        key = ForOffsets.key(key, sig)
        plan = _plans.get(key) or _plans.find(key)
    if plan is not None:
        _counters["compile_cache_hit"] += 1
    return plan


def keep(key: tuple[Any, ...], instead: Any) -> Any:
    """Puts something in place of the plan of a signature until its plan is made."""
    with _making:
        return _plans.keep(key, instead)


def find_plan(key: tuple[Any, ...], sig: CallSignature, make: Callable[[], Call]) -> Plan | Unsupported:
    """The plan of a signature, made at its first call."""
    with _making:
        plan: Any = _plans.find(key)
        of_offsets = ForOffsets.key(key, sig)
        if isinstance(plan, ForOffsets):
            plan = _plans.find(of_offsets)
        if isinstance(plan, (Plan, Unsupported)):
            return plan
        try:
            call = make()
            plan = stored_plans.find(call)
            if plan is None:
                plan = make_plan(call)
                stored_plans.keep(call, plan)
            check_fits(plan.nbytes)
            if mode.fused:
                plan.call = call
            else:
                plan.compiled()
        except NotImplementedError as error:
            plan = Unsupported(str(error))
        except client_errors() as error:
            plan = Unsupported(refused.reason(error))
        else:
            owner = key[0]
            programs.made(owner.kind, owner.title, described.fields(call, owner.argument_names), plan.number)
            if plan.for_offsets and sig.starts:
                _plans.keep(key, ForOffsets())
                key = of_offsets
        _plans.keep(key, plan)
        return plan


def _refuse(plan: Plan, reason: str) -> None:
    _plans.replace(plan, Unsupported(reason))
    simple_plans.replace(plan, None)


graph.forget_plan = _refuse


def clear_plans() -> None:
    """Forgets every compiled program."""
    _plans.clear()
    simple_plans.clear()
    chunk.clear()


runtime_client.forget_programs = clear_plans


# --- arguments ---------------------------------------------------------------------------------------------------

_number_buffers = Recent(4096)
_start_buffers = Recent(16384)


def number_buffer(value: Any, dtype: torch.dtype) -> Buffer:
    """A 0-d device buffer of a number; recent ones are kept."""
    key = (dtype, value if value else str(value))  # 0.0 and -0.0 are equal but not the same
    found = _number_buffers.find(key)
    if found is None:
        with np.errstate(over="ignore"):
            found = _number_buffers.keep(key, client().put(np.asarray(value, types.NUMPY[dtype])))
    return found


def starts_buffer(starts: tuple[int, ...]) -> Buffer:
    found = _start_buffers.find(starts)
    return _start_buffers.keep(starts, client().put(np.asarray(starts, np.int32))) if found is None else found


def _buffers(plan: Plan, sig: CallSignature) -> list[Buffer]:
    """What a program reads of a call's values, waiting for what other threads are about to write."""
    buffers = []
    values = sig.values
    for i in plan.bases:
        value = values[i]
        if isinstance(value, Taken):
            value = values[i] = value.settled()
        array = value.array
        buffers.append(value.initialised() if array is None else array)
    return buffers


def _arguments(plan: Plan, sig: CallSignature, generator: Any) -> list[Buffer]:
    arguments = _buffers(plan, sig)
    for i, _ in plan.starts:
        arguments.append(starts_buffer(sig.starts[i]))
    for i, dtype in plan.data:
        arguments.append(number_buffer(sig.data[i], dtype))
    for i, _ in plan.hosts:
        arguments.append(client().put(to_numpy(sig.hosts[i])))
    if plan.uses_rng:
        seed, offset = hooks.take_random(generator, plan.draws)
        arguments.append(client().put(np.array([seed, offset // 4], np.uint64)))
    return arguments


# --- running -----------------------------------------------------------------------------------------------------


def submit(plan: Plan, sig: CallSignature, generator: Any = None) -> Any:
    """Runs or records a plan on a call's tensors and returns what the operator returns."""
    if mode.fused:
        return defer(plan, sig, generator)
    arguments = _arguments(plan, sig, generator)
    if plan.updated:
        return _submit_update(plan, sig, arguments)
    try:
        results = (plan.executable or plan.compiled())(arguments)
        if mode.blocking and results:
            results[-1].block_until_ready()
    except Exception as error:
        raise translate(error) from error
    _counters["execute"] += 1
    if plan.checks:
        _look_at_checks(plan, results)
    return _finish(plan, sig, lambda slot, g: Value(results[slot], g))


def _look_at_checks(plan: Plan, results: Sequence[Buffer]) -> None:
    for slot, message, kind, value in plan.checks:
        metrics.note("sync", "check of an index or argument")
        if not is_true(results[slot]):
            raise kind(message if value is None else message.format(contents(results[value])))


# What `references` counts for a value in a signature and a Writing, its buffer among a program's arguments.
_HELD = (UNSHARED[0] + 1, UNSHARED[1] + 1)


class Changed(Exception):
    """Another thread gave a storage that a call writes another geometry: the call begins anew."""


def _read_again(plan: Plan, sig: CallSignature) -> None:
    """Gives a signature the values that another thread has written meanwhile."""
    for i in plan.updated:
        value = value_of(sig.storages[i])
        if value.geometry is not sig.values[i].geometry:
            raise Changed
        sig.values[i] = value


def _submit_update(plan: Plan, sig: CallSignature, arguments: list[Buffer]) -> Any:
    """Runs a plan that computes new values of storages from their old ones, for other threads in one step.

    It takes the memory of what it writes, or of a copy where somebody else refers to that. Once the program has
    started, old values whose memory it took are gone: an interruption must not keep the new ones from taking their
    place.
    """
    values = sig.values
    donated: list[Content] = []
    enqueued: list[Any] = []
    results: list[Buffer] = []
    try:
        executable = plan.executable or plan.compiled()
        writing = Writing()
        try:
            while not writing.take(sig.storages, values, plan.updated):
                _read_again(plan, sig)
                arguments[: len(plan.bases)] = _buffers(plan, sig)
            for argument, i, _ in plan.reused:
                if references(values, i) == _HELD:
                    donated.append(values[i])
                else:
                    arguments[argument] = client().copy(arguments[argument])
            launch((executable,), (arguments,), enqueued)
        finally:
            try:
                if enqueued:
                    results = executable.results(enqueued[0])
                    if plan.checks and not plan.guarded:
                        _look_at_checks(plan, results)
                    for old in donated:
                        old.give_up()
                    for i, slot, g in plan.writes:
                        sig.storages[i].value = Value(results[slot], g)
            finally:
                writing.end()
        if mode.blocking:
            results[-1].block_until_ready()
    except Changed:
        raise
    except Exception as error:
        raise translate(error) from error
    _counters["execute"] += 1
    if plan.guarded and plan.checks:
        _look_at_checks(plan, results)
    return _returned(plan, sig, lambda slot, g: Value(results[slot], g))


def defer(plan: Plan, sig: CallSignature, generator: Any) -> Any:
    """Records a plan in this thread's graph."""
    pending = graph.current()
    numbers = _numbers(plan, sig, generator) if plan.numbers else None
    recorded = None
    while recorded is None:
        _make_readable(plan, sig, pending)
        write = Write(sig.tensors[i] for i, *_ in plan.writes) if plan.checks and plan.writes else None
        with pending.lock, publishing if plan.writes else _nothing:
            if all(sig.storages[i].value is sig.values[i] for i in plan.updated):
                recorded = pending.record(plan, sig.values, numbers, write)
                result = _recorded(plan, sig, pending, recorded)
        if recorded is None:
            _read_again(plan, sig)
    if pending.nbytes >= graph.LARGE or len(pending.operators) >= graph.LONGEST:
        pending.grown()
    return result


def _recorded(plan: Plan, sig: CallSignature, pending: graph.Graph, first: Pending | int) -> Any:
    if isinstance(first, Pending):
        return new_contiguous(plan.returned.sizes, plan.returned.dtype, first)
    return _finish(plan, sig, lambda slot, g: pending.value(first + slot, g))


# In place of a lock.
_nothing = contextlib.nullcontext()


def _make_readable(plan: Plan, sig: CallSignature, pending: graph.Graph) -> None:
    """Waits for what other threads are about to write, runs what they have recorded."""
    values = sig.values
    for i in plan.bases:
        value = values[i]
        if isinstance(value, Taken):
            value = values[i] = value.settled()
        of_graph = value.graph  # another thread may compute it meanwhile
        if of_graph is not None:
            if of_graph is not pending:
                of_graph.flush("used by another thread")
        elif value.array is None:
            value.initialised()


def _numbers(plan: Plan, sig: CallSignature, generator: Any) -> list[Sequence[Any]]:
    """What is given for a plan's number parameters, in their order."""
    numbers: list[Sequence[Any]] = [sig.starts[i] for i, _ in plan.starts]
    numbers += [(sig.data[i],) for i, _ in plan.data]
    numbers += [(to_numpy(sig.hosts[i])[()],) for i, _ in plan.hosts]
    if plan.uses_rng:
        seed, offset = hooks.take_random(generator, plan.draws)
        numbers.append((seed, offset // 4))
    return numbers


def _finish(plan: Plan, sig: CallSignature, value: Callable[[int, Geometry], Content]) -> Any:
    """Re-points written storages; the call's result made of the values in the plan's result slots."""
    for i, slot, g in plan.writes:
        sig.storages[i].value = value(slot, g)
    return _returned(plan, sig, value)


def _returned(plan: Plan, sig: CallSignature, value: Callable[[int, Geometry], Content]) -> Any:
    """The call's result made of the values in the plan's result slots."""
    returned = plan.returned
    if type(returned) is Fresh:
        return _fresh(returned, value(returned.result, returned.geometry))
    if type(returned) is Alias and returned.same:
        return sig.tensors[returned.input]
    return _assemble(returned, value, sig, {})


def _fresh(place: Fresh, value: Content) -> torch.Tensor:
    if place.contiguous:
        return new_contiguous(place.sizes, place.dtype, value)
    storage = new_storage(place.geometry.nbytes, value)
    return view(storage, place.dtype, place.offset, place.sizes, place.strides)


def _assemble(
    tree: Any, value: Callable[[int, Geometry], Content], sig: CallSignature, storages: dict[int, Any]
) -> Any:
    if isinstance(tree, Fresh):
        storage = storages.get(tree.result)
        if storage is None:
            result = _fresh(tree, value(tree.result, tree.geometry))
            storages[tree.result] = result.untyped_storage()
            return result
        return view(storage, tree.dtype, tree.offset, tree.sizes, tree.strides)
    if isinstance(tree, Alias):
        if tree.same:
            return sig.tensors[tree.input]
        source = sig.tensors[tree.input]
        offset = (int(source.storage_offset()) * source.itemsize + tree.offset) // tree.dtype.itemsize
        return view(sig.storages[tree.input], tree.dtype, offset, tree.sizes, tree.strides)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_assemble(t, value, sig, storages) for t in tree])
    return tree


def placeholders(value: Any, sig: CallSignature, is_data: IsData, taken: dict[str, int]) -> Any:
    """`value` with a Slot in place of everything that is not part of the program, in the order `argument` met it."""
    if isinstance(value, _Tensor):
        kind = "input" if value.is_tpu else "host"  # type: ignore[attr-defined]
    elif isinstance(value, (list, tuple)):
        return [placeholders(item, sig, is_data, taken) for item in value]
    elif is_data and isinstance(value, (int, float, complex)) and (is_data is True or is_data(value)):
        kind = "data"
    elif isinstance(value, torch._C.Generator):
        return None
    elif isinstance(value, torch.device):
        return torch.device("meta")
    else:
        return value
    index = taken.get(kind, 0)
    taken[kind] = index + 1
    return Slot(kind, index)


def computes_wide(sig: CallSignature, extra: list[Any]) -> bool:
    """Whether numbers enter the program as float64: some tensor or asked-for dtype has 64-bit floats."""
    dtypes = [t.dtype for t in sig.tensors] + [t.dtype for t in sig.hosts]
    dtypes += [v for v in extra if isinstance(v, torch.dtype)] + [torch.get_default_dtype()]
    return any(d in _WIDE for d in dtypes)
