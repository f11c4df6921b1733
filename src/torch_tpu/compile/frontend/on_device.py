"""Whether a graph has to do with the device. Asked of every graph that Inductor gets, so it imports nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def is_on_device(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> bool:
    """Whether a graph has to do with the device: by its inputs, its constants or what it makes."""
    values = [*examples, *graph.parameters(), *graph.buffers()]
    values += [n.meta.get("example_value", n.meta.get("val")) for n in graph.graph.nodes]
    return any(isinstance(t, torch.Tensor) and t.device.type == "tpu" for t in tree_leaves(values))
