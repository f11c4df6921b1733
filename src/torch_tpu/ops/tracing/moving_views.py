"""Views of inputs whose place in their storage is data: what a trace makes of them moves with them.

A trace sees the offset of one call, and its program serves views at other offsets too. So a view of such an input is
read in two steps: the input, whose slices start where the call says, and within it a place that is the same in every
call. That place is found on a *shadow*: a dense tensor of the input's sizes on which each view operator is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.hlo import strided
from torch_tpu.hlo.array import Array

# Steps of a view, and where their slices start.
Way = tuple[Sequence[strided.Step], Sequence[Array | int]]

aten = torch.ops.aten
# Their strides or offset count in the storage, not in the view they are called on.
_ABSOLUTE = frozenset(
    {aten.as_strided.default, aten.as_strided_.default, aten.resize_.default, aten.set_.source_Tensor}
)


@dataclass(frozen=True)
class MovingView:
    """An input that is a view, as it is read from what its storage holds.

    Attributes:
        index: which of the call's inputs it is.
    """

    index: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    way: Way

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, so that a write to some of them changes others."""
        return any(isinstance(step, (strided.Broadcast, strided.Windows)) for step in self.way[0])


class Followed:
    """The tensors of a trace that are views of windows.

    Attributes:
        lost: the trace used a view of a moving storage whose place is known for the present offset alone.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, MovingView, torch.Tensor]] = {}
        self._storages: set[int] = set()
        self.lost = False

    def add(self, tensor: torch.Tensor, window: MovingView) -> None:
        """An input of a storage of which some input's place is data."""
        shadow = torch.empty(window.sizes, dtype=window.dtype, device="meta")
        self._found[id(tensor)] = (tensor, window, shadow)
        self._storages.add(tensor.untyped_storage()._cdata)

    def moves(self, storage: torch.UntypedStorage) -> bool:
        """Whether an input's place in this storage is data."""
        return storage._cdata in self._storages

    def window(self, tensor: torch.Tensor) -> MovingView | None:
        found = self._found.get(id(tensor))
        return None if found is None else found[1]

    def ways(self, tensor: torch.Tensor) -> list[Way] | None:
        """From what the storage holds to the tensor's elements; None if it isn't followed."""
        found = self._found.get(id(tensor))
        if found is None:
            self.lost = self.lost or self.moves(tensor.untyped_storage())
            return None
        _, window, shadow = found
        inner = strided.view_steps(
            window.sizes,
            strided.contiguous_strides(window.sizes),
            tuple(shadow.shape),
            shadow.stride(),
            int(shadow.storage_offset()),
            window.dtype,
            shadow.dtype,
        )
        return [window.way, inner] if inner[0] else [window.way]

    def follow(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Told of each call of a view operator: its results are followed if its tensor is."""
        found = self._found.get(id(args[0])) if args else None
        if found is None:
            return
        source, window, shadow = found
        if func in _ABSOLUTE or window.overlaps:
            if result is source:
                del self._found[id(source)]
            return
        if func is aten._reshape_alias.default:
            func, args, kwargs = aten.view.default, args[:2], {}
        try:
            place = func(shadow, *args[1:], **kwargs)
        except RuntimeError:
            return
        several = isinstance(result, (list, tuple))
        storage = source.untyped_storage()._cdata
        for tensor, its in zip(result, place, strict=True) if several else [(result, place)]:
            # `new_empty_strided` and others like it only look at their tensor.
            if tensor is not source and tensor.untyped_storage()._cdata == storage:
                self._found[id(tensor)] = (tensor, window, its)
