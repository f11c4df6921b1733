"""Checkpointed regions are computed again one at a time: each waits for the gradient that needs it.

Without that a backward graph may compute all of them first, and hold all activations that checkpointing was to save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import stable_topological_sort

from torch_tpu.ops.checkpoint import after


def delay_recomputation(graph: GraphModule) -> None:
    """Puts `after(input, …)` before each checkpointed region of a backward graph.

    The input is the one that most of the region depends on. It waits for the gradient that the first operator using the
    region's results needs besides, and for the gradients that come of the regions before: until they are known, those
    regions' activations are held.
    """
    nodes = list(graph.graph.nodes)
    gradients = _descendants(nodes, [n for n in graph.graph.find_nodes(op="placeholder") if "tangents" in n.name])
    regions = []
    for members in _regions(nodes, gradients):
        arriving = _arriving(nodes, members, gradients - _descendants(nodes, members))
        value = _main_input(nodes, members)
        if arriving is not None and value is not None:
            regions.append((arriving, members, value))
    place = {node: i for i, node in enumerate(nodes)}
    regions.sort(key=lambda region: place[region[0]])
    previous = None
    for arriving, members, value in regions:
        gates = [arriving]
        if previous is not None:
            own = _descendants(nodes, [arriving, *members])
            gates += _ends(nodes, _descendants(nodes, [previous]) - own)
        waiting = graph.graph.call_function(after, (value, gates))
        waiting.meta = dict(value.meta)
        for node in members:
            node.replace_input_with(value, waiting)
        previous = arriving
    if regions:
        stable_topological_sort(graph)
        graph.recompile()


def _regions(nodes: Iterable[Node], gradients: set[Node]) -> Iterable[list[Node]]:
    """What is computed again of each checkpointed region."""
    regions: defaultdict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        region = node.meta.get("ac_graph_id")
        if region is not None and node.op == "call_function" and node not in gradients:
            regions[region].append(node)
    return regions.values()


def _descendants(nodes: Iterable[Node], roots: Iterable[Node]) -> set[Node]:
    """The roots and what is computed from them."""
    found = set(roots)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _arriving(nodes: Iterable[Node], members: list[Node], gradients: set[Node]) -> Node | None:
    """The first gradient that meets something of a region."""
    inside = set(members)
    for node in nodes:
        if node not in inside and not inside.isdisjoint(node.all_input_nodes):
            found = next((n for n in node.all_input_nodes if n in gradients and _is_floating(n)), None)
            if found is not None:
                return found
    return None


def _ends(nodes: Iterable[Node], part: set[Node]) -> list[Node]:
    """The nodes of a part of the graph that nothing else in it uses."""
    return [n for n in nodes if n in part and part.isdisjoint(n.users) and _is_floating(n)]


def _main_input(nodes: list[Node], members: list[Node]) -> Node | None:
    inside = set(members)
    inputs = dict.fromkeys(n for m in members for n in m.all_input_nodes if n not in inside and _is_tensor(n))
    return max(inputs, key=lambda n: len(_descendants(nodes, [n]) & inside), default=None)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
