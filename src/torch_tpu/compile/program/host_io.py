"""Host tensors among the arguments and results of a graph: copied to the device before its program, and back after it.

What a graph computes on the host between the two is part of the program too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_tpu.compile.program.node_value import node_value


class Border:
    """Where host tensors enter and leave a graph. Numbers (0-d tensors) enter every program as they are.

    Attributes:
        refused: why no program can express the graph; empty if one can.
    """

    def __init__(self, graph: GraphModule) -> None:
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._entering = [i for i, n in enumerate(placeholders) if node_value(n).is_on_host and node_value(n).dim]
        # The place of each host result, and of the argument that it is, if it is one.
        self._leaving = [
            (i, placeholders.index(n) if n in placeholders else None)
            for i, n in enumerate(graph.graph.output_node().args[0])  # type: ignore[arg-type]
            if isinstance(n, Node) and node_value(n).is_on_host
        ]
        self.refused = next(filter(None, map(_refused, graph.graph.nodes)), "")

    def __bool__(self) -> bool:
        return bool(self._entering or self._leaving)

    def enter(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with those of the host on the device."""
        entered = list(args)
        for i in self._entering:
            # PyTorch gives None for tokens, by which it orders side effects.
            entered[i] = None if args[i] is None else args[i].to("tpu")
        return entered

    def leave(self, results: list[Any], args: Sequence[Any]) -> list[Any]:
        """The results with those of the host on the host; `args` are what `enter` was given."""
        for i, argument in self._leaving:
            if argument is not None:
                results[i] = args[argument]
            elif results[i] is not None:
                results[i] = results[i].cpu()
        return results


def _refused(node: Node) -> str:
    if node.op != "call_function" or not node_value(node).is_on_host:
        return ""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return f"{node.target} draws from the CPU's random generator"
    if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":  # type: ignore[union-attr]
        return "the graph writes to a CPU tensor"
    return ""
