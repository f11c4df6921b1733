"""Collectives: `_c10d_functional`, inside a program of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import communication, structured
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.communication import Group
from torch_tpu.ops.core.registry import lower

_COMBINE: dict[str, Callable[..., Array]] = {
    "sum": hlo.add,
    "avg": hlo.add,
    "product": hlo.multiply,
    "min": hlo.minimum,
    "max": hlo.maximum,
    "band": hlo.and_,
    "bor": hlo.or_,
    "bxor": hlo.xor,
}
# XLA:CPU reduces over processes by none of these: the values are moved, and reduced where they arrive.
_BITWISE = {"band": -1, "bor": 0, "bxor": 0}
_OF_BOOL = {"sum": hlo.or_, "max": hlo.or_, "product": hlo.and_, "min": hlo.and_}


def group_of(name: Any) -> Group:
    """The ranks of a group of `torch.distributed`, by its name or itself, or as `Group` describes them."""
    described = Group.described(name) if isinstance(name, str) else None
    if described is not None:
        return described
    found: Any = c10d._resolve_process_group(name) if isinstance(name, str) else name  # type: ignore[arg-type]
    return Group(dist.get_process_group_ranks(found), dist.get_world_size())


def _combine(kind: str, dtype: torch.dtype) -> Callable[..., Array]:
    found = _OF_BOOL.get(kind, _COMBINE.get(kind)) if dtype is torch.bool else _COMBINE.get(kind)
    floats = dtype.is_floating_point or dtype.is_complex
    if found is None or (kind == "avg" and not floats) or (kind in ("band", "bor", "bxor") and floats):
        raise NotImplementedError(f"{kind} of {dtype} tensors over processes")
    return found


def _averaged(kind: str, reduced: Array, group: Group) -> Array:
    return reduced / hlo.constant(group.size, reduced.dtype) if kind == "avg" else reduced


def _reduced(kind: str, rows: Array, combine: Callable[..., Array]) -> Array:
    initial = _BITWISE[kind] if rows.dtype is not torch.bool else kind == "band"
    return structured.reduce_one(rows, initial, [0], combine)


@lower("_c10d_functional::all_reduce")
def all_reduce(x: Array, reduce_op: str, group_name: Any) -> Array:
    group, combine = group_of(group_name), _combine(reduce_op, x.dtype)
    if reduce_op in _BITWISE:
        return _reduced(reduce_op, communication.all_gather(hlo.reshape(x, (1, *x.shape)), group), combine)
    return _averaged(reduce_op, communication.all_reduce(x, group, combine), group)


@lower("_c10d_functional::all_reduce_coalesced")
def all_reduce_coalesced(inputs: Sequence[Array], reduce_op: str, group_name: Any) -> list[Array]:
    return [all_reduce(x, reduce_op, group_name) for x in inputs]


@lower("_c10d_functional::all_gather_into_tensor")
def all_gather_into_tensor(x: Array, group_size: int, group_name: Any) -> Array:
    return communication.all_gather(x if x.ndim else hlo.reshape(x, (1,)), group_of(group_name))


@lower("_c10d_functional::all_gather_into_tensor_coalesced")
def all_gather_into_tensor_coalesced(inputs: Sequence[Array], group_size: int, group_name: Any) -> list[Array]:
    return [all_gather_into_tensor(x, group_size, group_name) for x in inputs]


@lower("_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_tensor(x: Array, reduce_op: str, group_size: int, group_name: Any) -> Array:
    group, combine = group_of(group_name), _combine(reduce_op, x.dtype)
    if reduce_op in _BITWISE:
        parts = (group_size, x.shape[0] // group_size, *x.shape[1:])
        return _reduced(reduce_op, hlo.reshape(communication.all_to_all(x, group), parts), combine)
    return _averaged(reduce_op, communication.reduce_scatter(x, group, combine), group)


@lower("_c10d_functional::reduce_scatter_tensor_coalesced")
def reduce_scatter_tensor_coalesced(
    inputs: Sequence[Array], reduce_op: str, group_size: int, group_name: Any
) -> list[Array]:
    return [reduce_scatter_tensor(x, reduce_op, group_size, group_name) for x in inputs]


@lower("_c10d_functional::all_to_all_single")
def all_to_all_single(x: Array, received: Sequence[int], sent: Sequence[int], group_name: Any) -> Array:
    """Unequal parts are no program: each rank would need another one."""
    group = group_of(group_name)
    if len({*received, *sent}) > 1 or x.shape[0] % group.size:
        raise NotImplementedError("all_to_all with parts of different sizes")
    return communication.all_to_all(x, group)


@lower("_c10d_functional::broadcast")
def broadcast(x: Array, src: int, group_name: Any) -> Array:
    """XLA:CPU has no collective_broadcast: all values are gathered, and the root's taken."""
    gathered = communication.all_gather(hlo.reshape(x, (1, *x.shape)), group_of(group_name))
    return hlo.reshape(hlo.slice_in_dim(gathered, src, src + 1), x.shape)


@lower("_c10d_functional::wait_tensor")
def wait_tensor(x: Array) -> Array:
    """XLA knows what waits for what."""
    return x
