"""What a graph says of a node's value before it runs, as far as anything but tracing needs it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

# Where a graph that was read from disk has it; one that was just captured has the fake value, as "val".
META = "kind"


class NodeValue(NamedTuple):
    """A node's value.

    Attributes:
        device: the type of a tensor's device; empty for what is no tensor.
        is_dynamic: it is a size, or a tensor with a size, that only a call knows.
    """

    device: str = ""
    dim: int = 0
    is_dynamic: bool = False

    @property
    def is_on_host(self) -> bool:
        return self.device == "cpu"


def node_value(node: Node) -> NodeValue:
    """The kind of a node's value."""
    stored: NodeValue | None = node.meta.get(META)
    if stored is not None:
        return stored
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return NodeValue(value.device.type, value.dim(), any(isinstance(size, torch.SymInt) for size in value.shape))
    return NodeValue(is_dynamic=isinstance(value, torch.SymInt))
