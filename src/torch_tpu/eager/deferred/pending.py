"""Results of recorded operators that are not computed before somebody needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_tpu.runtime.client import Buffer
from torch_tpu.tensor.storage import Content, Geometry, Value

if TYPE_CHECKING:
    from torch_tpu.eager.deferred.deferred_graph import DeferredGraph


class Pending(Content):
    """A result that is not computed before somebody needs it."""

    __slots__ = ("computed", "graph", "slot")
    computed: Value

    def __init__(self, graph: DeferredGraph, slot: int, geometry: Geometry) -> None:
        self.graph: DeferredGraph | Failed | None = graph
        self.slot = slot
        self.geometry = geometry

    @property
    def array(self) -> Buffer | None:  # type: ignore[override]
        """The buffer; asking for it runs what leads to it.

        Raises:
            RuntimeError: where running it failed.
        """
        graph = self.graph
        if graph is not None:
            graph.flush("read")
        return self.computed.array

    def fill(self, buffer: Buffer) -> None:
        self.computed = Value(buffer, self.geometry)
        self.graph = None

    def give_up(self) -> None:
        self.computed.give_up()


class Failed:
    """In place of the graph of what was never computed."""

    def flush(self, cause: str) -> None:
        raise RuntimeError("this tensor was never computed: the program it was part of failed")


class NotReadyError(Exception):
    """A value that a graph can't read as it is: pending in another thread's graph, or memory nobody has written."""
