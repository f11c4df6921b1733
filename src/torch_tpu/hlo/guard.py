"""Keeps an old value where a condition turns out not to hold, without a copy of it.

`select(condition, new, old)` needs both whole values. Where the new one is the old one with elements written to places
that data decides (a key-value cache), nothing is written instead: the places become ones that don't exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxlib.mlir import ir

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array

# StableHLO's scatter leaves out updates whose index is out of bounds.
NOWHERE = -1


def kept_unless(conditions: Sequence[Array], new: Array, old: Array) -> Array:
    """`new` if all conditions hold, else `old`: values of the function under construction, equal in shape and dtype."""
    if not conditions:
        return new
    writes = _scatters(new, old)
    needed = _needed_by([c.value for c in conditions])
    # A condition that depends on what was written comes too late to stop the write.
    if not writes or any(op in needed for op in writes):
        for condition in conditions:
            new = hlo.select(condition, new, old)
        return new
    _move_before(writes[0], needed)
    with ir.InsertionPoint(writes[0]):
        holds = conditions[0]
        for condition in conditions[1:]:
            holds = hlo.and_(holds, condition)
    for op in writes:
        index = op.operands[1]
        kind = ir.RankedTensorType(index.type)
        dtype = torch.int32 if ir.IntegerType(kind.element_type).width == 32 else torch.int64
        places = Array(index, kind.shape, dtype)
        with ir.InsertionPoint(op):
            op.operands[1] = hlo.select(holds, places, hlo.full(places.shape, NOWHERE, dtype)).value
    return new


def _scatters(new: Array, old: Array) -> list[Any]:
    """The scatters that make `new` of `old`, in order; none where anything else does."""
    found: list[Any] = []
    value = new.value
    while value != old.value:
        op = _operation(value)
        if op is None or op.name != "stablehlo.scatter" or len(op.results) != 1:
            return []
        found.insert(0, op)
        value = op.operands[0]
    return found


def _needed_by(values: Sequence[Any]) -> set[Any]:
    """The operations that values depend on."""
    found: set[Any] = set()
    waiting = [_operation(value) for value in values]
    while waiting:
        op = waiting.pop()
        if op is not None and op not in found:
            found.add(op)
            waiting += [_operation(value) for value in _operands(op)]
    return found


def _operands(op: Any) -> list[Any]:
    inner = [o for region in op.regions for block in region.blocks for o in block.operations]
    return [*op.operands, *(value for o in inner for value in _operands(o.operation))]


def _operation(value: Any) -> Any:
    """What computes a value; None for the argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _move_before(place: Any, operations: set[Any]) -> None:
    """Moves those operations that come later in the same block before `place`, in their order."""
    is_later = False
    for op in list(place.operation.block.operations):
        if op.operation == place:
            is_later = True
        elif is_later and op.operation in operations:
            op.operation.move_before(place)
