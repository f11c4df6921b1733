"""What a call returns: tensors made of the values that its program computes, or views of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Alias, Fresh, Plan
from torch_tpu.tensor.storage import Content, Geometry, new_contiguous, new_storage, view

# The value of a result slot with a geometry.
ValueOf = Callable[[int, Geometry], Content]


def finish(plan: Plan, call: CallSignature, value: ValueOf) -> Any:
    """Re-points written storages; what the call returns."""
    for i, slot, g in plan.writes:
        call.storages[i].value = value(slot, g)
    return returned(plan, call, value)


def returned(plan: Plan, call: CallSignature, value: ValueOf) -> Any:
    """What the call returns."""
    tree = plan.returned
    if type(tree) is Fresh:
        return _fresh(tree, value(tree.result, tree.geometry))
    if type(tree) is Alias and tree.same:
        return call.tensors[tree.input]
    return _assemble(tree, value, call, {})


def _fresh(place: Fresh, value: Content) -> torch.Tensor:
    if place.contiguous:
        return new_contiguous(place.sizes, place.dtype, value)
    storage = new_storage(place.geometry.nbytes, value)
    return view(storage, place.dtype, place.offset, place.sizes, place.strides)


def _assemble(tree: Any, value: ValueOf, call: CallSignature, storages: dict[int, Any]) -> Any:
    if isinstance(tree, Fresh):
        storage = storages.get(tree.result)
        if storage is None:
            result = _fresh(tree, value(tree.result, tree.geometry))
            storages[tree.result] = result.untyped_storage()
            return result
        return view(storage, tree.dtype, tree.offset, tree.sizes, tree.strides)
    if isinstance(tree, Alias):
        if tree.same:
            return call.tensors[tree.input]
        source = call.tensors[tree.input]
        offset = (int(source.storage_offset()) * source.itemsize + tree.offset) // tree.dtype.itemsize
        return view(call.storages[tree.input], tree.dtype, offset, tree.sizes, tree.strides)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_assemble(t, value, call, storages) for t in tree])
    return tree
