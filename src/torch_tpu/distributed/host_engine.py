"""The engine of devices whose memory is the host's: collectives by torch's gloo, on that memory.

Each function begins one and returns the results, which may be on their way, and the job that computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_tpu.distributed import gloo
from torch_tpu.distributed.job import Job, Run, Spec
from torch_tpu.distributed.reductions import Reduction, reduction
from torch_tpu.metrics import user_lines

if TYPE_CHECKING:
    from torch_tpu.distributed.group import TpuProcessGroup

Started = tuple[list[torch.Tensor], Job]
Shape = Sequence[int]


def _start(
    group: TpuProcessGroup,
    name: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[Spec],
    run: Run,
    *details: Any,
    shown: Sequence[Spec] | None = None,
) -> Started:
    """Begins a collective.

    Args:
        shown: the tensors that all ranks have alike, if those are not the inputs.
        details: what else has to be equal on all ranks.
    """
    alike = [(t.shape, t.dtype) for t in inputs] if shown is None else shown
    title = f"{name}({', '.join([*map(_text, alike), *map(str, details)])})"
    job = Job(title, run, inputs, group.collectives.number(), user_lines.here_or_backward())
    results = [job.result(shape, dtype) for shape, dtype in outputs]
    group.collectives.start(job)
    return results, job


def _text(spec: Spec) -> str:
    return f"{str(spec[1]).removeprefix('torch.')}{list(spec[0])}"


def _specs(tensors: Sequence[torch.Tensor]) -> list[Spec]:
    return [(tuple(t.shape), t.dtype) for t in tensors]


def _reduction(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], op: Any) -> Reduction:
    """The reduction, which all inputs have: what can't be reduced is refused before other ranks wait for it."""
    how = reduction(op, group.size())
    for given in inputs:
        how.of_gloo(given.dtype)
    return how


def all_reduce(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], op: Any) -> Started:
    how = _reduction(group, inputs, op)
    return _start(group, "all_reduce", inputs, _specs(inputs), partial(gloo.all_reduce, group.gloo, how), how)


def reduce(group: TpuProcessGroup, given: torch.Tensor, op: Any, root: int) -> Started:
    """The root alone gets a result."""
    how = _reduction(group, [given], op)
    outputs = _specs([given]) if group.rank() == root else []
    run = partial(gloo.reduce, group.gloo, how, root)
    return _start(group, "reduce", [given], outputs, run, how, f"to {group.ranks[root]}")


def reduce_scatter(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape], op: Any) -> Started:
    how = _reduction(group, inputs, op)
    for given, shape in zip(inputs, shapes, strict=True):
        if given.numel() != math.prod(shape) * group.size():
            raise ValueError(
                f"reduce_scatter: an input of {given.numel()} elements has no {group.size()} equal parts of the "
                f"output's {math.prod(shape)}"
            )
    outputs = [(tuple(shape), given.dtype) for given, shape in zip(inputs, shapes, strict=True)]
    run = partial(gloo.reduce_scatter, group.gloo, how)
    return _start(group, "reduce_scatter", inputs, outputs, run, how)


def reduce_scatter_list(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], op: Any) -> Started:
    how = _reduction(group, inputs, op)
    own = inputs[group.rank()]
    run = partial(gloo.reduce_scatter_list, group.gloo, how, group.rank())
    return _start(group, "reduce_scatter", inputs, _specs([own]), run, how)


def broadcast(group: TpuProcessGroup, tensors: Sequence[torch.Tensor], root: int) -> Started:
    """The root's tensors are read, those of the others say what they get. No results for the root."""
    mine = group.rank() == root
    run = partial(gloo.broadcast, group.gloo, root)
    inputs, outputs = (tensors, []) if mine else ([], _specs(tensors))
    return _start(group, "broadcast", inputs, outputs, run, f"from {group.ranks[root]}", shown=_specs(tensors))


def all_gather(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Started:
    for given, shape in zip(inputs, shapes, strict=True):
        if given.numel() * group.size() != math.prod(shape):
            raise ValueError(
                f"all_gather: {group.size()} inputs of {given.numel()} elements don't fill an output of "
                f"{math.prod(shape)}"
            )
    outputs = [(tuple(shape), given.dtype) for given, shape in zip(inputs, shapes, strict=True)]
    return _start(group, "all_gather", inputs, outputs, partial(gloo.all_gather, group.gloo))


def all_gather_list(group: TpuProcessGroup, given: torch.Tensor, shapes: Sequence[Shape]) -> Started:
    outputs = [(tuple(shape), given.dtype) for shape in shapes]
    if len(outputs) != group.size() or math.prod(shapes[group.rank()]) != given.numel():
        raise ValueError(
            f"all_gather: {len(outputs)} outputs for {group.size()} ranks, and rank {group.rank()} gives "
            f"{given.numel()} elements"
        )
    run = partial(gloo.all_gather_list, group.gloo, group.rank())
    return _start(group, "all_gather", [given], outputs, run, shown=outputs)


def gather(group: TpuProcessGroup, given: torch.Tensor, root: int) -> Started:
    outputs = _specs([given]) * group.size() if group.rank() == root else []
    run = partial(gloo.gather, group.gloo, root)
    return _start(group, "gather", [given], outputs, run, f"to {group.ranks[root]}")


def scatter(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], like: torch.Tensor, root: int) -> Started:
    """The root gives a tensor for each rank; `like` is what each gets."""
    outputs = _specs([like])
    run = partial(gloo.scatter, group.gloo, root)
    given = inputs if group.rank() == root else []
    return _start(group, "scatter", given, outputs, run, f"from {group.ranks[root]}", shown=outputs)


def all_to_all(
    group: TpuProcessGroup, given: torch.Tensor, shape: Shape, received: Sequence[int], sent: Sequence[int]
) -> Started:
    """Parts along the first dimension; equal ones where no sizes are given."""
    sizes = [_rows(group, given.shape, sent, "input"), _rows(group, shape, received, "output")]
    row = given.element_size() * math.prod(given.shape[1:])
    splits = [row * n for n in sizes[0]], [row * n for n in sizes[1]]
    outputs = [(tuple(shape), given.dtype)]
    shown: list[Spec] = [(tuple(given.shape[1:]), given.dtype)] if sent or received else _specs([given])
    return _start(group, "all_to_all", [given], outputs, partial(gloo.all_to_all, group.gloo, splits), shown=shown)


def _rows(group: TpuProcessGroup, shape: Shape, splits: Sequence[int], what: str) -> Sequence[int]:
    """How many rows of a tensor are for or of each rank."""
    rows, size = (shape[0] if len(shape) else 1), group.size()
    if not splits and rows % size == 0:
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"all_to_all: {rows} rows of the {what} don't split into {list(splits) or size} parts")
    return splits


def all_to_all_list(group: TpuProcessGroup, inputs: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> Started:
    dtype = inputs[0].dtype
    outputs = [(tuple(shape), dtype) for shape in shapes]
    return _start(group, "all_to_all", inputs, outputs, partial(gloo.all_to_all_list, group.gloo), dtype, shown=())


def send(group: TpuProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Job:
    title = f"send({_text((tensor.shape, tensor.dtype))}, to {group.ranks[peer]})"
    job = Job(title, partial(gloo.send, group.gloo, peer, tag), [tensor], -1, user_lines.here_or_backward())
    group.peers.start(job)
    return job


def receive(group: TpuProcessGroup, like: torch.Tensor, peer: int | None, tag: int) -> Started:
    origin = "any rank" if peer is None else f"{group.ranks[peer]}"
    title = f"recv({_text((like.shape, like.dtype))}, from {origin})"
    job = Job(title, partial(gloo.receive, group.gloo, peer, tag), [], -1, user_lines.here_or_backward())
    result = job.result(like.shape, like.dtype)
    group.peers.start(job)
    return [result], job


def barrier(group: TpuProcessGroup) -> Job:
    _, job = _start(group, "barrier", [], [], partial(gloo.barrier, group.gloo))
    return job
