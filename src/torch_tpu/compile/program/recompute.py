"""Checkpointed regions are computed again one at a time: each waits for the gradient that needs it.

Without that a backward graph may compute all of them first, and hold all activations that checkpointing was to save.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx import GraphModule, Node
from torch.fx.passes.tools_common import stable_topological_sort
from torch.utils._pytree import tree_leaves

from torch_tpu.ops.checkpoint import RANDOM_STATE_BYTES, after


def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """PyTorch's min-cut partitioner; the random states that checkpointing saves are on the device, where programs have
    them: PyTorch takes those of a device it does not know for the host's.
    """
    forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
    saved = [n for n in forward.graph.find_nodes(op="call_function", target=operator.getitem) if _is_state(n)]
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if n.name.startswith("rng_state_output")]
    for pair in zip(saved, taken, strict=True):
        (drawn,) = (n for n in pair[0].all_input_nodes[0].users if n is not pair[0])
        value = next(v for v in tree_leaves(drawn.meta["val"]) if isinstance(v, torch.Tensor))
        if value.device.type == "tpu":
            for node in pair:
                node.meta["val"] = value.new_empty(RANDOM_STATE_BYTES, dtype=torch.uint8)
    return forward, backward


def _is_state(node: Node) -> bool:
    source, place = node.args
    target: object = source.target if isinstance(source, Node) else None
    return target is run_and_save_rng_state and isinstance(place, int) and not place


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


def one_by_one(graph: GraphModule, calls: Sequence[tuple[Node, int]]) -> None:
    """Lets each call of a function that computes again wait for all results of the call before: its gradients are gates
    of what it computes again.

    Args:
        calls: with each how many of its last arguments are gradients.
    """
    previous: list[Node] = []
    for call, gradients in calls:
        own = call.all_input_nodes
        gates = [n for n in previous if n not in own and _is_floating(n)]
        for gradient in own[-gradients:] if gates else ():
            with graph.graph.inserting_before(call):
                waiting = graph.graph.call_function(after, (gradient, gates))
            waiting.meta = dict(gradient.meta)
            call.replace_input_with(gradient, waiting)
        previous = list(call.users)
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
