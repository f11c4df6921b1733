"""The device's kernels of `_c10d_functional`: the collectives that return their result.

Of a group of another backend (the fake one of a plan, for example) PyTorch's own kernel serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torch_tpu.distributed.group import TpuProcessGroup
from torch_tpu.distributed.values import write
from torch_tpu.tensor.storage import value_of

_COMPOSITE = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []
_kernels: dict[str, Callable[..., Any]] = {}


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the kernel of an operator: it gets the group in place of its name, which comes last."""
    func = getattr(torch.ops._c10d_functional, name).default

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            *given, group = args
            if isinstance(group, str):
                group = c10d._resolve_process_group(group)  # type: ignore[arg-type]
            if not isinstance(group, TpuProcessGroup):
                return func.redispatch(_COMPOSITE, *args, **kwargs)
            return function(group, *given, **kwargs)

        _kernels[name] = call
        return call

    return register


@_kernel("all_reduce")
def all_reduce(group: TpuProcessGroup, given: torch.Tensor, op: str) -> torch.Tensor:
    return group.engine.all_reduce(group, [given], op)[0][0]


@_kernel("all_reduce_")
def all_reduce_(group: TpuProcessGroup, given: torch.Tensor, op: str) -> torch.Tensor:
    write(given, value_of(all_reduce.__wrapped__(group, given, op).untyped_storage()))  # type: ignore[attr-defined]
    return given


@_kernel("all_reduce_coalesced")
def all_reduce_coalesced(group: TpuProcessGroup, given: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
    return group.engine.all_reduce(group, given, op)[0]


@_kernel("all_reduce_coalesced_")
def all_reduce_coalesced_(group: TpuProcessGroup, given: Sequence[torch.Tensor], op: str) -> Sequence[torch.Tensor]:
    for target, result in zip(given, group.engine.all_reduce(group, given, op)[0], strict=True):
        write(target, value_of(result.untyped_storage()))
    return given


@_kernel("all_gather_into_tensor")
def all_gather_into_tensor(group: TpuProcessGroup, given: torch.Tensor, size: int) -> torch.Tensor:
    return group.engine.all_gather(group, [given], [_gathered(given, size)])[0][0]


@_kernel("all_gather_into_tensor_out")
def all_gather_into_tensor_out(
    group: TpuProcessGroup, given: torch.Tensor, size: int, *, out: torch.Tensor
) -> torch.Tensor:
    write(out, value_of(group.engine.all_gather(group, [given], [out.shape])[0][0].untyped_storage()))
    return out


@_kernel("all_gather_into_tensor_coalesced")
def all_gather_into_tensor_coalesced(
    group: TpuProcessGroup, given: Sequence[torch.Tensor], size: int
) -> list[torch.Tensor]:
    return group.engine.all_gather(group, given, [_gathered(t, size) for t in given])[0]


def _gathered(given: torch.Tensor, size: int) -> tuple[int, ...]:
    return (size * given.shape[0], *given.shape[1:]) if given.dim() else (size,)


@_kernel("reduce_scatter_tensor")
def reduce_scatter_tensor(group: TpuProcessGroup, given: torch.Tensor, op: str, size: int) -> torch.Tensor:
    return group.engine.reduce_scatter(group, [given], [_scattered(given, size)], op)[0][0]


@_kernel("reduce_scatter_tensor_out")
def reduce_scatter_tensor_out(
    group: TpuProcessGroup, given: torch.Tensor, op: str, size: int, *, out: torch.Tensor
) -> torch.Tensor:
    write(out, value_of(group.engine.reduce_scatter(group, [given], [out.shape], op)[0][0].untyped_storage()))
    return out


@_kernel("reduce_scatter_tensor_coalesced")
def reduce_scatter_tensor_coalesced(
    group: TpuProcessGroup, given: Sequence[torch.Tensor], op: str, size: int
) -> list[torch.Tensor]:
    return group.engine.reduce_scatter(group, given, [_scattered(t, size) for t in given], op)[0]


def _scattered(given: torch.Tensor, size: int) -> tuple[int, ...]:
    if given.shape[0] % size:
        raise ValueError(f"reduce_scatter: {given.shape[0]} rows don't split into {size} equal parts")
    return (given.shape[0] // size, *given.shape[1:])


@_kernel("all_to_all_single")
def all_to_all_single(
    group: TpuProcessGroup, given: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> torch.Tensor:
    shape = (sum(received) if received else given.shape[0], *given.shape[1:])
    return group.engine.all_to_all(group, given, shape, list(received), list(sent))[0][0]


@_kernel("broadcast")
def broadcast(group: TpuProcessGroup, given: torch.Tensor, root: int) -> torch.Tensor:
    results, _ = group.engine.broadcast(group, [given], root)
    return results[0] if results else given.clone()


@_kernel("broadcast_")
def broadcast_(group: TpuProcessGroup, given: torch.Tensor, root: int) -> torch.Tensor:
    for result in group.engine.broadcast(group, [given], root)[0]:
        write(given, value_of(result.untyped_storage()))
    return given


@_kernel("isend")
def isend(group: TpuProcessGroup, given: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
    """`peer` is a rank of the world, as in `irecv`."""
    group.engine.send(group, given, group.ranks.index(peer), tag)
    return given.new_empty(0)


@_kernel("irecv")
def irecv(group: TpuProcessGroup, like: torch.Tensor, peer: int, tag: int) -> torch.Tensor:
    write(like, value_of(group.engine.receive(group, like, group.ranks.index(peer), tag)[0][0].untyped_storage()))
    return like


@_kernel("batch_p2p_ops")
def batch_p2p_ops(
    group: TpuProcessGroup,
    names: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    functions = {"isend": isend, "irecv": irecv}
    return [
        functions[name].__wrapped__(group, tensor, peer, tag)  # type: ignore[attr-defined]
        for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True)
    ]


def _wait_tensor(given: torch.Tensor) -> torch.Tensor:
    """Who reads a result waits for it."""
    return given


def install() -> None:
    """Registers the kernels, once."""
    if not _libraries:
        library = torch.library.Library("_c10d_functional", "IMPL")
        for name, kernel in _kernels.items():
            library.impl(name, kernel, "PrivateUse1")
        library.impl("wait_tensor", _wait_tensor, "PrivateUse1")
        _libraries.append(library)
