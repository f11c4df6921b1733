"""StableHLO's collectives. A module that has one runs on several ranks at once, which its attributes name.

Nothing is sent where there are no elements: all ranks then have none.

An operation is built for the group that it is called for; `hlo.replicas` adds the others once the module is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir.dialects import stablehlo

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import types
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.replicas import groups_attribute
from torch_tpu.hlo.structured import Combine, fill_region
from torch_tpu.hlo.target import target


class Group:
    """The ranks of a collective, in the world of so many."""

    __slots__ = ("ranks", "world")

    def __init__(self, ranks: Sequence[int], world: int) -> None:
        self.ranks = tuple(ranks)
        self.world = world

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return f"ranks {','.join(map(str, self.ranks))} of {self.world}"

    @classmethod
    def described(cls, text: str) -> Group | None:
        """The group that `str` describes so; None for any other text."""
        found = re.fullmatch(r"ranks ([\d,]+) of (\d+)", text)
        return None if found is None else cls(list(map(int, found[1].split(","))), int(found[2]))


def _noted(operation: Any, group: Group) -> Any:
    """The result of a collective, which the module under construction now has."""
    target().collectives.append((operation.operation, group.ranks, group.world))
    return operation.operation.results[0]


def all_reduce(x: Array, group: Group, combine: Combine) -> Array:
    if not x.size:
        return x
    own = groups_attribute([range(group.size)])
    operation = stablehlo.AllReduceOp([x.value.type], [x.value], own)
    fill_region(operation.regions[0], [((), x.dtype)] * 2, combine)
    return Array(_noted(operation, group), x.shape, x.dtype)


def all_gather(x: Array, group: Group) -> Array:
    """The ranks' values one behind the other along the first dimension."""
    shape = (group.size * x.shape[0], *x.shape[1:])
    if not x.size:
        return hlo.zeros(shape, x.dtype)
    result = types.tensor_type(shape, x.dtype)
    operation = stablehlo.AllGatherOp([result], [x.value], 0, groups_attribute([range(group.size)]))
    return Array(_noted(operation, group), shape, x.dtype)


def reduce_scatter(x: Array, group: Group, combine: Combine) -> Array:
    """Each rank's part, along the first dimension, of the ranks' reduced values."""
    shape = (x.shape[0] // group.size, *x.shape[1:])
    if not x.size:
        return hlo.zeros(shape, x.dtype)
    result = types.tensor_type(shape, x.dtype)
    operation = stablehlo.ReduceScatterOp(result, x.value, 0, groups_attribute([range(group.size)]))
    fill_region(operation.regions[0], [((), x.dtype)] * 2, combine)
    return Array(_noted(operation, group), shape, x.dtype)


def all_to_all(x: Array, group: Group) -> Array:
    """Equal parts along the first dimension: part n goes to rank n."""
    if not x.size:
        return x
    operation = stablehlo.AllToAllOp([x.value], 0, 0, group.size, groups_attribute([range(group.size)]))
    return Array(_noted(operation, group), x.shape, x.dtype)
