"""Runs plans: finds or makes the plan of a call, gathers its arguments, and turns results into tensors.

`submit` is the seam between recording and running. Strict modes run each plan at once; fused mode puts the plan and its
input values into this thread's graph (`defer`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_tpu import metrics
from torch_tpu.eager import hooks, mode
from torch_tpu.eager.deferred import deferred_graph, segment
from torch_tpu.eager.deferred.deferred_graph import Pending
from torch_tpu.eager.deferred.runtime_checks import Write
from torch_tpu.eager.host import compile_refused
from torch_tpu.eager.program import recompile_reason, stored_plans
from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Alias, Call, Fresh, Plan, make_plan
from torch_tpu.eager.recent import Recent
from torch_tpu.hlo import types
from torch_tpu.metrics import programs
from torch_tpu.runtime import client as runtime_client
from torch_tpu.runtime.client import Buffer, client, client_errors, launch
from torch_tpu.tensor.errors import check_fits, translate
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

# Plan or Unsupported by signature. Forgetting a plan also frees its executable.
MOST_PLANS = 16384
_plans = Recent(MOST_PLANS)
# Those of simple calls once more, by shorter keys (`eager.dispatch.fast_path`).
simple_plans = Recent(MOST_PLANS)
_making = threading.RLock()
_counters = metrics.counts.counters


@dataclass(frozen=True)
class Unsupported:
    """In place of a plan: a call that no program can express, and why."""

    reason: str


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


def find_plan(
    key: tuple[Any, ...], sig: CallSignature, make: Callable[[], Call], judge: Callable[[], None] | None = None
) -> Plan | Unsupported:
    """The plan of a signature, made at its first call.

    Args:
        judge: asks the CPU whether it takes such a call: raises for numbers that it refuses, and warns as it warns. A
            trace does so itself, a stored plan does not.
    """
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
            elif judge is not None:
                judge()
            check_fits(plan.nbytes)
            if mode.fused:
                plan.call = call
            else:
                plan.compiled()
        except NotImplementedError as error:
            plan = Unsupported(str(error))
        except client_errors() as error:
            plan = Unsupported(compile_refused.reason(error))
        else:
            owner = key[0]
            programs.made(owner.kind, owner.title, recompile_reason.fields(call, owner.argument_names), plan.number)
            if plan.for_offsets and sig.starts:
                _plans.keep(key, ForOffsets())
                key = of_offsets
        _plans.keep(key, plan)
        return plan


def _refuse(plan: Plan, reason: str) -> None:
    _plans.replace(plan, Unsupported(reason))
    simple_plans.replace(plan, None)


deferred_graph.forget_plan = _refuse


def clear_plans() -> None:
    """Forgets every compiled program."""
    _plans.clear()
    simple_plans.clear()
    segment.clear()


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
    pending = deferred_graph.current()
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
    if pending.nbytes >= deferred_graph.LARGE or len(pending.operators) >= deferred_graph.LONGEST:
        pending.grown()
    return result


def _recorded(plan: Plan, sig: CallSignature, pending: deferred_graph.Graph, first: Pending | int) -> Any:
    if isinstance(first, Pending):
        return new_contiguous(plan.returned.sizes, plan.returned.dtype, first)
    return _finish(plan, sig, lambda slot, g: pending.value(first + slot, g))


# In place of a lock.
_nothing = contextlib.nullcontext()


def _make_readable(plan: Plan, sig: CallSignature, pending: deferred_graph.Graph) -> None:
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
