"""What storages hold while a collective is on its way: its result, and memory of which it writes a part."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torch_tpu.hlo import types
from torch_tpu.hlo.strided import contiguous_strides
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor import storage as st
from torch_tpu.tensor import transfer
from torch_tpu.tensor.storage import Content, Geometry, Value
from torch_tpu.tensor.transfer import Place


class Awaited(Protocol):
    """What will compute a content. A graph of fused eager has the same method."""

    def flush(self, cause: str) -> None:
        """Waits for it.

        Raises:
            RuntimeError: it failed.
        """


def adopted(host: torch.Tensor, g: Geometry) -> Value:
    """A value over the memory of a host tensor with its elements, which nobody writes to any more."""
    array = transfer.to_numpy(host).reshape(tuple(g.sizes))
    return Value(client().adopt(array), g)


class _Late(Content):
    """A value that is there later."""

    __slots__ = ("computed", "graph")
    computed: Value

    @property
    def array(self) -> Buffer | None:  # type: ignore[override]
        """The buffer; asking for it waits."""
        graph: Awaited | None = self.graph
        if graph is not None:
            graph.flush("read")
        return self.computed.array

    def initialised(self) -> Buffer:
        array = self.array
        return self.computed.initialised() if array is None else array

    def fill(self, value: Value) -> None:
        self.computed = value
        self.graph = None

    def give_up(self) -> None:
        self.computed.give_up()


class Arriving(_Late):
    """A result of a collective, row-major."""

    __slots__ = ()

    def __init__(self, graph: Awaited, g: Geometry) -> None:
        self.graph = graph
        self.geometry = g


class Updated(_Late):
    """A value of which collectives write parts, put together when it is asked for.

    It is its own `graph`: asking it to run is asking for the parts.
    """

    __slots__ = ("_lock", "_nbytes", "_old", "_parts")

    def __init__(self, old: Content, nbytes: int, parts: Sequence[tuple[Place, Content]]) -> None:
        """`parts` are places and what will be there; where two overlap, the later one counts."""
        self.geometry = old.geometry
        self._old: Content | None = old
        self._nbytes = nbytes
        self._parts = list(parts)
        self._lock = threading.RLock()
        self.graph = self

    def with_part(self, place: Place, part: Content) -> Updated | None:
        """The same with one more part; None if this one has been put together."""
        with self._lock:
            if self._old is None:
                return None
            return Updated(self._old, self._nbytes, [*self._parts, (place, part)])

    def flush(self, cause: str) -> None:
        with self._lock:
            if self._old is None:
                return
            for _, part in self._parts:
                if part.graph is not None:
                    part.graph.flush(cause)
            memory = transfer.host_memory(self._old, self._nbytes)
            for place, part in self._parts:
                elements = transfer.from_numpy(transfer.contents(part.initialised()), part.dtype)
                transfer.host_tensor(memory, *place).copy_(elements.view(place.sizes))
            g = self.geometry
            whole = transfer.host_tensor(memory, g.dtype, 0, g.sizes, g.strides)
            self.fill(adopted(whole, g))
            self._old = None
            self._parts = []


def write(target: torch.Tensor, value: Content) -> None:
    """Gives a device tensor new elements, row-major and of its shape and dtype, without waiting for them.

    The tensor's version does not change, as that of a tensor that a collective writes elsewhere does not.
    """
    storage: Any = target.untyped_storage()
    if not target.numel():
        return
    if target.numel() * target.element_size() == storage.nbytes() and target.is_contiguous():
        storage.value = value
        return
    place = place_of(target)
    while True:
        old = st.value_of(storage)
        if old.graph is not None and not isinstance(old, _Late):
            old.graph.flush("collective")  # what is recorded runs
        updated = old.with_part(place, value) if isinstance(old, Updated) else None
        updated = updated or Updated(old, storage.nbytes(), [(place, value)])
        with st.publishing:
            if storage.value is old:
                storage.value = updated
                return


def place_of(tensor: torch.Tensor) -> Place:
    """Where a device tensor lies in its storage."""
    return Place(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def host_elements(value: Content, place: Place) -> torch.Tensor:
    """The elements at a place in a value, in order, on the host; waits for them.

    They lie in the device's own memory where that can be: nobody may write to them.
    """
    if 0 in place.sizes:
        return torch.empty(place.sizes, dtype=place.dtype, device="cpu")
    array = transfer.contents(value.initialised())
    found: torch.Tensor = transfer.place_in(transfer.from_numpy(array, value.dtype), value.geometry, place).contiguous()
    return found


def is_late(value: Content) -> bool:
    """Whether a collective computes a value, or did so."""
    return isinstance(value, _Late)


def is_there(value: Content) -> bool:
    """Whether a value can be read without waiting."""
    if value.graph is not None:
        return False
    array = value.array
    return array is None or client().is_ready(array)


def contiguous_result(graph: Awaited, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Arriving]:
    """A new device tensor for a result of a collective, and what it holds."""
    types.numpy_dtype(dtype)
    value = Arriving(graph, st.geometry(shape, contiguous_strides(shape), dtype))
    return st.new_contiguous(value.sizes, dtype, value), value
