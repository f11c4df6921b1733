"""Records the launch of a plan in this thread's graph, in place of running it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch_tpu import hooks
from torch_tpu.eager.deferred.deferred_graph import LARGE, LONGEST, DeferredGraph
from torch_tpu.eager.deferred.pending import NotReadyError
from torch_tpu.eager.deferred.runtime_checks import Write
from torch_tpu.eager.deferred.thread_graphs import current
from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Plan
from torch_tpu.eager.program.results import finish
from torch_tpu.tensor.storage import Taken, new_contiguous, publishing
from torch_tpu.tensor.transfer import to_numpy


def record(plan: Plan, values: list[Any], data: list[Any], call: CallSignature | None, generator: Any) -> Any:
    """Records a plan and returns what the operator returns; arguments as of `dispatch.launch`.

    Raises:
        Changed: where the call has to begin anew.
    """
    graph = current()
    scalars: list[Sequence[Any]] | None = None
    if plan.numbers:
        scalars = [(data[i],) for i, _ in plan.data] if call is None else _scalars(plan, call, generator)
    while True:
        try:
            if plan.is_simple:
                returned, fresh = graph.record(plan, values, scalars), plan.returned
                if graph.nbytes >= LARGE or len(graph.operators) >= LONGEST:
                    graph.grown()
                return new_contiguous(fresh.sizes, fresh.dtype, returned)  # type: ignore[arg-type]
            assert call is not None
            result = _record_call(plan, call, graph, scalars)
            break
        except NotReadyError:
            _make_readable(plan, values, graph)
    if graph.nbytes >= LARGE or len(graph.operators) >= LONGEST:
        graph.grown()
    return result


def _record_call(plan: Plan, call: CallSignature, graph: DeferredGraph, scalars: list[Sequence[Any]] | None) -> Any:
    """Records a call that writes, or returns other than one contiguous tensor."""
    while True:
        write = Write(call.tensors[i] for i, *_ in plan.writes) if plan.checks and plan.writes else None
        with graph.lock, publishing if plan.writes else _nothing:
            if all(call.storages[i].value is call.values[i] for i in plan.updated):
                return _finish(plan, call, graph, graph.record(plan, call.values, scalars, write))
        call.read_again(plan.updated)


def _finish(plan: Plan, call: CallSignature, graph: DeferredGraph, first: Any) -> Any:
    return finish(plan, call, lambda slot, g: graph.value(first + slot, g))


# In place of a lock.
_nothing = contextlib.nullcontext()


def _make_readable(plan: Plan, values: list[Any], graph: DeferredGraph) -> None:
    """Waits for what other threads are about to write, runs what they have recorded."""
    for i in plan.bases:
        value = values[i]
        if isinstance(value, Taken):
            value = values[i] = value.settled()
        of_graph = value.graph  # another thread may compute it meanwhile
        if of_graph is not None:
            if of_graph is not graph:
                of_graph.flush("used by another thread")
        elif value.array is None:
            value.initialised()


def _scalars(plan: Plan, call: CallSignature, generator: Any) -> list[Sequence[Any]]:
    """What is given for a plan's parameters that are no values, in their order."""
    scalars: list[Sequence[Any]] = [call.starts[i] for i, _ in plan.starts]
    scalars += [(call.data[i],) for i, _ in plan.data]
    scalars += [(to_numpy(call.hosts[i])[()],) for i, _ in plan.hosts]
    if plan.uses_rng:
        seed, offset = hooks.take_random(generator, plan.draws)
        scalars.append((seed, offset // 4))
    return scalars
