"""The engine that a TPU has: each collective is a program of the group's ranks, made of the same lowering as in graphs.

The functions are those of `distributed.host_engine`. What is no program of all ranks alike (parts of different sizes,
sends and receives) goes through the host's memory there, where the device's is the host's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch_tpu.distributed import host_engine
from torch_tpu.distributed.job import Job
from torch_tpu.distributed.reductions import reduction
from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.hlo.communication import Group
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor import transfer
from torch_tpu.tensor.storage import value_of

if TYPE_CHECKING:
    from torch_tpu.distributed.group import TpuProcessGroup

Started = tuple[list[torch.Tensor], Any]
Shape = Sequence[int]


class Launched:
    """In place of a job: programs that run."""

    number = 0
    failure = ""

    def __init__(self, title: str, results: Sequence[torch.Tensor]) -> None:
        self.title = title
        self._values = [value_of(t.untyped_storage()) for t in results]

    def poll(self) -> bool:
        return all(v.array is None or client().is_ready(v.array) for v in self._values)

    def wait(self, seconds: float = math.inf) -> bool:
        for value in self._values:
            if value.array is not None:
                transfer.contents(value.array)
        return True

    def check(self) -> None:
        """A program that failed says so where its result is read."""

    def flush(self, cause: str) -> None:
        self.wait()


def _run(group: TpuProcessGroup, name: str, given: torch.Tensor, *args: Any) -> torch.Tensor:
    func = getattr(torch.ops._c10d_functional, name).default
    # Not by its name: other jobs, and later groups of this one, give that to other ranks, and programs are kept.
    members = str(Group(group.ranks, dist.get_world_size()))
    result: torch.Tensor = as_program(func)(given, *args, members)
    return result


def _reduced(given: torch.Tensor, op: Any, size: int) -> tuple[torch.Tensor, str]:
    """What is reduced, and how."""
    how = reduction(op, size)
    how.of_gloo(given.dtype)
    if how.factor is None:
        return given, how.name
    return given * (how.factor.to("tpu") if isinstance(how.factor, torch.Tensor) else how.factor), "sum"


def all_reduce(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], op: Any) -> Started:
    results = [_run(group, "all_reduce", *_reduced(t, op, group.size())) for t in inputs]
    return results, Launched("all_reduce", results)


def reduce(group: TpuProcessGroup, given: torch.Tensor, op: Any, root: int) -> Started:
    results, job = all_reduce(group, [given], op)
    return (results if group.rank() == root else []), job


def reduce_scatter(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape], op: Any) -> Started:
    results = []
    for given, shape in zip(inputs, shapes, strict=True):
        operand, kind = _reduced(given, op, group.size())
        results.append(_run(group, "reduce_scatter_tensor", operand.reshape(-1), kind, group.size()).view(tuple(shape)))
    return results, Launched("reduce_scatter", results)


def reduce_scatter_list(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], op: Any) -> Started:
    if len({t.numel() for t in inputs}) == 1:
        flat = torch.cat([t.reshape(-1) for t in inputs])
        return reduce_scatter(group, [flat], [inputs[group.rank()].shape], op)
    results, job = all_reduce(group, inputs, op)
    return [results[group.rank()]], job


def broadcast(group: TpuProcessGroup, tensors: Sequence[torch.Tensor], root: int) -> Started:
    results = [_run(group, "broadcast", t, root) for t in tensors]
    return ([] if group.rank() == root else results), Launched("broadcast", results)


def all_gather(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Started:
    results = [
        _run(group, "all_gather_into_tensor", given.reshape(-1), group.size()).view(tuple(shape))
        for given, shape in zip(inputs, shapes, strict=True)
    ]
    return results, Launched("all_gather", results)


def all_gather_list(group: TpuProcessGroup, given: torch.Tensor, shapes: Sequence[Shape]) -> Started:
    longest = max(map(math.prod, shapes))
    padded = F.pad(given.reshape(-1), (0, longest - given.numel()))
    ((rows,), job) = all_gather(group, [padded], [(group.size(), longest)])
    pieces = zip(rows.unbind(), shapes, strict=True)
    return [row[: math.prod(shape)].view(tuple(shape)).clone() for row, shape in pieces], job


def gather(group: TpuProcessGroup, given: torch.Tensor, root: int) -> Started:
    results, job = all_gather_list(group, given, [given.shape] * group.size())
    return (results if group.rank() == root else []), job


def scatter(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], like: torch.Tensor, root: int) -> Started:
    mine = group.rank() == root
    everything = torch.stack(list(inputs)) if mine else like.new_empty((group.size(), *like.shape))
    result = _run(group, "broadcast", everything, root)[group.rank()].clone()
    return [result], Launched("scatter", [result])


def all_to_all(
    group: TpuProcessGroup, given: torch.Tensor, shape: Shape, received: Sequence[int], sent: Sequence[int]
) -> Started:
    if received or sent:
        return _by_host().all_to_all(group, given, shape, received, sent)
    equal = [given.shape[0] // group.size()] * group.size()
    result = _run(group, "all_to_all_single", given, equal, equal)
    return [result], Launched("all_to_all", [result])


def all_to_all_list(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Started:
    return _by_host().all_to_all_list(group, inputs, shapes)


def send(group: TpuProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Job:
    return _by_host().send(group, tensor, peer, tag)


def receive(group: TpuProcessGroup, like: torch.Tensor, peer: int | None, tag: int) -> Started:
    return _by_host().receive(group, like, peer, tag)


def barrier(group: TpuProcessGroup) -> Job:
    return host_engine.barrier(group)


def _by_host() -> Any:
    if not client().is_host_memory:
        raise NotImplementedError("parts of different sizes, sends and receives are not implemented on this platform")
    return host_engine
