"""Recognises a call of a compiled graph by an earlier one: where nothing but data changed, the program is the same.

A CallSignature costs microseconds for each argument. Dynamo has compared shapes, strides and dtypes with those of the
captured call before it calls a forward graph, so it is enough to compare what it does not know: how values lie in
storages, and which arguments share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Plan
from torch_tpu.ops.tracing import uninitialised

_storage: Any = torch.Tensor.untyped_storage
_contiguous: Any = torch.Tensor.is_contiguous
_matmul_precision = torch._C._get_float32_matmul_precision
_default_dtype = torch.get_default_dtype


class Recall:
    """What an earlier call of a graph with fixed shapes looked like, and its plan."""

    __slots__ = ("contiguous", "geometries", "places", "plan", "settings", "sharing", "starts")

    def __init__(self, plan: Plan, sig: CallSignature, strides_are_known: bool) -> None:
        """`sig` has nothing but tensors of the device."""
        self.plan = plan
        self.geometries = [v.geometry for v in sig.values]
        self.contiguous = None if strides_are_known else list(map(_contiguous, sig.tensors))
        # Of those that are not all that their storage holds, in row-major order.
        self.places = [
            (i, t.stride(), t.storage_offset(), t.is_conj())
            for i, (t, g) in enumerate(zip(sig.tensors, self.geometries, strict=True))
            if t.shape != g.sizes or not t.is_contiguous() or g.is_complex
        ]
        self.starts = sig.starts
        self.sharing = _sharing(sig.storages)
        self.settings = (_matmul_precision(), _default_dtype(), uninitialised.is_filled())

    def signature(self, tensors: list[Any]) -> CallSignature | None:
        """The signature of a call that needs the same program; None if this one may need another."""
        try:
            storages = list(map(_storage, tensors))
            values = [storage.value for storage in storages]
        except (AttributeError, TypeError):
            return None  # memory nobody has written, or no tensor of the device
        if (
            [v.geometry for v in values] != self.geometries
            or (self.contiguous is not None and list(map(_contiguous, tensors)) != self.contiguous)
            or (_matmul_precision(), _default_dtype(), uninitialised.is_filled()) != self.settings
        ):
            return None
        for i, *place in self.places:
            t = tensors[i]
            if place != [t.stride(), t.storage_offset(), t.is_conj()]:
                return None
        if (self.sharing or self.plan.writes) and _sharing(storages) != self.sharing:
            return None
        sig = CallSignature([])
        sig.tensors, sig.values, sig.storages, sig.starts = tensors, values, storages, self.starts
        return sig


def _sharing(storages: Sequence[Any]) -> list[int]:
    """For each storage the first that is the same; nothing where all are different."""
    first: dict[int, int] = {}
    places = [first.setdefault(id(storage), i) for i, storage in enumerate(storages)]
    return places if len(first) < len(places) else []
