"""A recorded operator for which the compiler turns out to have no code, run on the CPU in place of its program.

Fused mode compiles when values are needed. By then the call is over, and what is left of it is its plan, the buffers
of its inputs and its numbers. From these the call's arguments are made again as host tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_tpu import metrics
from torch_tpu.eager.host import fallback
from torch_tpu.eager.program.plan import Call, Fresh, Plan, ScalarArguments, fill
from torch_tpu.hlo import types
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.ops.core.schema import call
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import Geometry, Value
from torch_tpu.tensor.transfer import host_memory, host_tensor, upload


def run_on_cpu(
    plan: Plan, operands: Sequence[Buffer], numbers: ScalarArguments, place: CallSite, why: str
) -> list[Buffer]:
    """What a plan's program would return.

    Args:
        place: the user's line that recorded it.

    Raises:
        NotImplementedError: where `TORCH_TPU_FALLBACK=error`, the CPU has no kernel either, or the plan is that of a
            graph of torch.compile.
    """
    recorded = plan.call
    if recorded is None or recorded.func is None:
        raise NotImplementedError(f"{why}; later calls like it run operator by operator")
    func = recorded.func
    inputs, storages = _inputs(plan, recorded, operands, numbers)
    args, kwargs = fill((recorded.args, recorded.kwargs), inputs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with metrics.waiting("operator on the CPU"):
        returned = call(func, args, kwargs)
    fallback.admit(func.name(), why, place)

    results: dict[int, torch.UntypedStorage] = {}
    _place(plan.returned, returned, results)
    geometries = {slot: g for _, slot, g in plan.writes} | _geometries(plan.returned)
    results.update((slot, storages[i]) for i, slot, _ in plan.writes)
    # No condition is left to look at: the CPU looked at them.
    conditions = {slot for slot, *_ in plan.checks}
    return [
        upload(_whole(results[slot], geometries[slot]))
        if slot in results
        else client().put(np.full(shape, slot in conditions, types.numpy_dtype(dtype)))
        for slot, (shape, dtype) in enumerate(plan.results)
    ]


def _whole(storage: torch.UntypedStorage, g: Geometry) -> torch.Tensor:
    return host_tensor(storage, g.dtype, 0, g.sizes, g.strides)


def _inputs(
    plan: Plan, recorded: Call, operands: Sequence[Buffer], numbers: ScalarArguments
) -> tuple[dict[str, Sequence[Any]], dict[int, torch.UntypedStorage]]:
    """The tensors and numbers of a call, by what Slots call them, and the storage of each input that has its own.

    What the program did not take keeps the value it was traced with, or zeros: the operator does not depend on it.
    """
    values = {i: Value(buffer, recorded.inputs[i].geometry) for i, buffer in zip(plan.bases, operands, strict=True)}
    storages = {
        i: host_memory(values.get(i), spec.nbytes) for i, spec in enumerate(recorded.inputs) if spec.storage == i
    }
    given = iter(numbers or ())
    offsets = {i: next(given).offset for i, _ in plan.starts}  # type: ignore[attr-defined]
    data = {**dict(enumerate(recorded.data)), **{i: next(given)[0] for i, _ in plan.data}}
    hosts = {i: next(given)[0] for i, _ in plan.hosts}
    tensors = []
    for i, spec in enumerate(recorded.inputs):
        offset = offsets.get(i, spec.offset)
        tensor = host_tensor(storages[spec.storage], spec.dtype, offset, spec.sizes, spec.strides)
        tensors.append(tensor.conj() if spec.conj else tensor)
    scalars = [torch.tensor(hosts.get(i, 0), dtype=dtype, device="cpu") for i, dtype in enumerate(recorded.hosts)]
    return {"input": tensors, "data": [data[i] for i in range(len(data))], "host": scalars}, storages


def _place(tree: Any, returned: Any, storages: dict[int, torch.UntypedStorage]) -> None:
    """Writes what the CPU returned to storages laid out as the plan's results are."""
    if isinstance(tree, Fresh):
        if tree.result not in storages:
            storages[tree.result] = host_memory(None, tree.geometry.nbytes)
        host_tensor(storages[tree.result], tree.dtype, tree.offset, tree.sizes, tree.strides).copy_(returned)
    elif isinstance(tree, (list, tuple)):
        for branch, value in zip(tree, returned, strict=True):
            _place(branch, value, storages)


def _geometries(tree: Any) -> dict[int, Geometry]:
    if isinstance(tree, Fresh):
        return {tree.result: tree.geometry}
    found: dict[int, Geometry] = {}
    for branch in tree if isinstance(tree, (list, tuple)) else ():
        found |= _geometries(branch)
    return found
