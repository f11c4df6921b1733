"""The one way to run a plan: at once, or recorded in fused mode.

Every call of an operator and of a compiled graph comes here, from the fast path with its values and scalars alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_tpu import hooks, metrics
from torch_tpu.eager import mode
from torch_tpu.eager.deferred.record import record
from torch_tpu.eager.program.argument_buffers import scalar_buffer, starts_buffer
from torch_tpu.eager.program.call_signature import CallSignature, Changed
from torch_tpu.eager.program.plan import Plan
from torch_tpu.eager.program.results import finish, returned
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.client import launch as enqueue
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.errors import translate
from torch_tpu.tensor.storage import UNSHARED, Content, Taken, Value, Writing, new_contiguous, references
from torch_tpu.tensor.transfer import contents, is_true, to_numpy

_counters = metrics.counts.counters


def launch(
    plan: Plan, values: list[Any], data: list[Any], call: CallSignature | None = None, generator: Any = None
) -> Any:
    """Runs a plan, or records it in fused mode; returns what the operator returns.

    A program that communicates runs now: other ranks may never do what is recorded before and after it.

    Args:
        values, data: what the call's tensors hold, and its scalars that the program takes.
        call: the call; None on the fast path, whose plans need nothing else of it.

    Raises:
        Changed: where the call has to begin anew.
    """
    if mode.fused and not plan.ranks:
        return record(plan, values, data, call, generator)
    if call is None:
        arguments = []
        for i in plan.bases:
            array = values[i].array
            arguments.append(_readable(values, i) if array is None else array)
        for i, dtype in plan.data:
            arguments.append(scalar_buffer(data[i], dtype))
    else:
        arguments = _arguments(plan, call, generator)
        if plan.updated:
            return _launch_update(plan, call, arguments)
    try:
        results = (plan.executable or plan.compiled())(arguments)
        if mode.blocking and results:
            results[-1].block_until_ready()
    except Exception as error:
        raise translate(error) from error
    _counters["execute"] += 1
    if call is None:
        fresh = plan.returned
        return new_contiguous(fresh.sizes, fresh.dtype, Value(results[0], fresh.geometry))
    if plan.checks:
        _look_at_checks(plan, results)
    return finish(plan, call, lambda slot, g: Value(results[slot], g))


def _readable(values: list[Any], i: int) -> Buffer:
    """The buffer of a value, after waiting for what another thread is about to write; memory nobody wrote is zeros."""
    value = values[i]
    if isinstance(value, Taken):
        value = values[i] = value.settled()
    array = value.array
    return value.initialised() if array is None else array


def _arguments(plan: Plan, call: CallSignature, generator: Any) -> list[Buffer]:
    arguments = [_readable(call.values, i) for i in plan.bases]
    for i, _ in plan.starts:
        arguments.append(starts_buffer(call.starts[i]))
    for i, dtype in plan.data:
        arguments.append(scalar_buffer(call.data[i], dtype))
    for i, _ in plan.hosts:
        arguments.append(client().put(to_numpy(call.hosts[i])))
    if plan.uses_rng:
        seed, offset = hooks.take_random(generator, plan.draws)
        arguments.append(client().put(np.array([seed, offset // 4], np.uint64)))
    return arguments


def _look_at_checks(plan: Plan, results: Sequence[Buffer]) -> None:
    for slot, message, kind, value in plan.checks:
        metrics.note("sync", "check of an index or argument")
        if not is_true(results[slot]):
            raise kind(message if value is None else message.format(contents(results[value])))


# What `references` counts for a value in a signature and a Writing, its buffer among a program's arguments.
_HELD = (UNSHARED[0] + 1, UNSHARED[1] + 1)


def _launch_update(plan: Plan, call: CallSignature, arguments: list[Buffer]) -> Any:
    """Runs a plan that computes new values of storages from their old ones, for other threads in one step.

    It takes the memory of what it writes, or of a copy where somebody else refers to that. Once the program has
    started, old values whose memory it took are gone: an interruption must not keep the new ones from taking their
    place.
    """
    values = call.values
    donated: list[Content] = []
    enqueued: list[Any] = []
    results: list[Buffer] = []
    try:
        executable = plan.executable or plan.compiled()
        writing = Writing()
        try:
            while not writing.take(call.storages, values, plan.updated):
                call.read_again(plan.updated)
                arguments[: len(plan.bases)] = [_readable(values, i) for i in plan.bases]
            for argument, i, _ in plan.reused:
                if references(values, i) == _HELD:
                    donated.append(values[i])
                else:
                    arguments[argument] = client().copy(arguments[argument])
            enqueue((executable,), (arguments,), enqueued)
        finally:
            try:
                if enqueued:
                    results = executable.results(enqueued[0])
                    if plan.checks and not plan.guarded:
                        _look_at_checks(plan, results)
                    for old in donated:
                        old.give_up()
                    for i, slot, g in plan.writes:
                        call.storages[i].value = Value(results[slot], g)
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
    return returned(plan, call, lambda slot, g: Value(results[slot], g))
