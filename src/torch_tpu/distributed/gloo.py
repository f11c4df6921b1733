"""Collectives on host memory by torch's gloo: each function begins one and returns what to wait for.

Inputs may be the device's own memory, which gloo reads in place and nobody writes to. Elements that only move travel as
bytes, so every dtype of the device can be sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torch_tpu.distributed.job import Begun
from torch_tpu.distributed.reductions import Reduction

Gloo = Any


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


def _options(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _all(afters: Sequence[Callable[[], None] | None]) -> Callable[[], None]:
    def after() -> None:
        for function in afters:
            if function is not None:
                function()

    return after


def all_reduce(gloo: Gloo, how: Reduction, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    works, afters = [], []
    for given, out in zip(ins, outs, strict=True):
        operand = _operand(how, given, out)
        works.append(gloo.allreduce([operand], _options(c10d.AllreduceOptions(), reduceOp=how.of_gloo(given.dtype))))
        afters.append(how.finish(operand, out))
    return works, _all(afters)


def _operand(how: Reduction, given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A rank's tensor where gloo may write the result: in the result's memory, if that has gloo's dtype."""
    if how.is_copied(given.dtype) or given.dtype is torch.bool or given.dtype.is_complex:
        return how.operand(given)
    return out.copy_(given)


def reduce(gloo: Gloo, how: Reduction, root: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """The root alone has an output."""
    operand = how.operand(ins[0])
    options = _options(c10d.ReduceOptions(), reduceOp=how.of_gloo(ins[0].dtype), rootRank=root)
    return [gloo.reduce([operand], options)], how.finish(operand, outs[0]) if outs else None


def broadcast(gloo: Gloo, root: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """The root has inputs, the others have outputs."""
    options = _options(c10d.BroadcastOptions(), rootRank=root)
    return [gloo.broadcast([_bytes(t)], options) for t in ins or outs], None


def all_gather(gloo: Gloo, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """Each output holds the tensors of all ranks one behind the other."""
    gathers = zip(ins, outs, strict=True)
    return [gloo._allgather_base(_bytes(out), _bytes(given), c10d.AllgatherOptions()) for given, out in gathers], None


def all_gather_list(gloo: Gloo, rank: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """An output for each rank; they may differ in size."""
    if len({out.numel() for out in outs}) == 1:
        return [gloo.allgather([[_bytes(out) for out in outs]], [_bytes(ins[0])], c10d.AllgatherOptions())], None
    works = []
    for root, out in enumerate(outs):
        if root == rank:
            out.copy_(ins[0].view(out.shape))
        works.append(gloo.broadcast([_bytes(out)], _options(c10d.BroadcastOptions(), rootRank=root)))
    return works, None


def gather(gloo: Gloo, root: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """The root has an output for each rank, the others have none."""
    options = _options(c10d.GatherOptions(), rootRank=root)
    return [gloo.gather([[_bytes(t) for t in outs]] if outs else [], [_bytes(ins[0])], options)], None


def scatter(gloo: Gloo, root: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """The root has an input for each rank, the others have none."""
    options = _options(c10d.ScatterOptions(), rootRank=root)
    return [gloo.scatter([_bytes(outs[0])], [[_bytes(t) for t in ins]] if ins else [], options)], None


def reduce_scatter(gloo: Gloo, how: Reduction, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """Each input holds a part for each rank, one behind the other."""
    works, afters = [], []
    for given, out in zip(ins, outs, strict=True):
        # gloo reads its operand alone.
        operand = how.operand(given) if how.is_copied(given.dtype) or given.dtype is torch.bool else given
        operand = torch.view_as_real(operand) if operand.is_complex() else operand
        flat = operand.reshape(-1)
        part = torch.empty(flat.numel() // how.size, dtype=flat.dtype, device="cpu")
        options = _options(c10d.ReduceScatterOptions(), reduceOp=how.of_gloo(given.dtype))
        works.append(gloo._reduce_scatter_base(part, flat, options))
        shape = (*out.shape, 2) if out.is_complex() else out.shape
        afters.append(how.finish(part.view(shape), out))
    return works, _all(afters)


def reduce_scatter_list(
    gloo: Gloo, how: Reduction, rank: int, ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> Begun:
    """An input for each rank; they may differ in size."""
    if len({t.numel() for t in ins}) == 1:
        return reduce_scatter(gloo, how, [torch.cat([t.reshape(-1) for t in ins])], outs)
    operands = [how.operand(t) for t in ins]
    works = [
        gloo.reduce([operand], _options(c10d.ReduceOptions(), reduceOp=how.of_gloo(ins[0].dtype), rootRank=root))
        for root, operand in enumerate(operands)
    ]
    return works, how.finish(operands[rank], outs[0])


def all_to_all(
    gloo: Gloo, splits: tuple[Sequence[int], Sequence[int]], ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> Begun:
    """`splits` are the bytes for each rank and of each rank; none where the parts are equal."""
    (given,), (out,) = ins, outs
    sent, received = splits
    work = gloo.alltoall_base(_bytes(out), _bytes(given), list(received), list(sent), c10d.AllToAllOptions())
    return [work], None


def all_to_all_list(gloo: Gloo, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """A tensor for each rank, and of each rank; they may differ in size."""
    sent = torch.cat([_bytes(t) for t in ins])
    sizes = [out.numel() * out.element_size() for out in outs]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    splits = [t.numel() * t.element_size() for t in ins]
    work = gloo.alltoall_base(received, sent, sizes, splits, c10d.AllToAllOptions())

    def after() -> None:
        for out, begin, size in zip(outs, itertools.accumulate(sizes, initial=0), sizes, strict=False):
            _bytes(out).copy_(received[begin : begin + size])

    return [work], after


def send(gloo: Gloo, peer: int, tag: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    return [gloo.send([_bytes(t)], peer, tag) for t in ins], None


def receive(gloo: Gloo, peer: int | None, tag: int, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    """From any rank where `peer` is None."""
    if peer is None:
        return [gloo.recv_anysource([_bytes(t)], tag) for t in outs], None
    return [gloo.recv([_bytes(t)], peer, tag) for t in outs], None


def barrier(gloo: Gloo, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> Begun:
    return [gloo.barrier(c10d.BarrierOptions())], None
