"""Equal parts of a graph are differentiated, traced and lowered once, and called as often as they occur.

Dynamo's graph gets one opaque operator, `torch_tpu::region`, in place of each copy (`outline`). AOTAutograd, whose cost
grows with the number of nodes, sees only that. In the graphs it makes, each becomes a call of the part's forward or
backward graph (`expand`), which the tracer turns into one function of the program, called N times.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_tpu import metrics
from torch_tpu.compile.layers.differentiate import (
    LeftAlone,
    OutlinedPart,
    check_written,
    differentiate,
    known_regions,
    returned,
)
from torch_tpu.compile.layers.repetition import repeated
from torch_tpu.ops.checkpoint import after

_invoke: Any = torch.ops.higher_order.invoke_subgraph


# --- Dynamo's graph ----------------------------------------------------------------------------------------------


def outline(graph: GraphModule) -> tuple[GraphModule, OutlinedPart | None]:
    """A copy of Dynamo's graph with an operator in place of each of its equal parts, and what that stands for.

    The graph itself and None where it has no equal parts, or where they can't be handled apart (`differentiate`). What
    a part writes to its inputs is written behind it.
    """
    parts = repeated(graph.graph)
    if not parts or not all(_is_on_device(n) for n in (*parts[0].inputs, *parts[0].outputs)):
        return graph, None
    try:
        region = differentiate(graph, parts[0])
        for part in parts:
            check_written(part, region.written)
    except LeftAlone:
        metrics.count("repetition_left_alone")
        return graph, None
    metrics.count("repetition_outlined", len(parts))
    copy = Graph()
    of_last = {part.nodes[-1]: part for part in parts}
    inside = {n for part in parts for n in part.nodes}
    known: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node not in inside:
            known[node] = copy.node_copy(node, known.__getitem__)
        elif node in of_last:
            part = of_last[node]
            tensors = [known[n] for n in part.inputs]
            call = copy.call_function(torch.ops.torch_tpu.region.default, (tensors, region.key))
            for i, output in enumerate(part.outputs):
                known[output] = copy.call_function(operator.getitem, (call, i))
                known[output].meta = dict(output.meta)
            for i, place in enumerate(region.written, len(part.outputs)):
                value = copy.call_function(operator.getitem, (call, i))
                copy.call_method("copy_", (tensors[place], value))
    return GraphModule(graph, copy), region


def _is_on_device(node: Node) -> bool:
    return node.meta["example_value"].device.type == "tpu"


# --- the operator ------------------------------------------------------------------------------------------------

_RANDOM = (torch.Tag.nondeterministic_seeded,)  # copies may draw random numbers, so equal calls are not the same


@torch.library.custom_op("torch_tpu::region", mutates_args=(), tags=_RANDOM)
def region(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    return list(known_regions[key].forward(*tensors))


@torch.library.custom_op("torch_tpu::region_backward", mutates_args=(), tags=_RANDOM)
def region_backward(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    backward = known_regions[key].backward
    assert backward is not None
    return list(backward(*tensors))


@region.register_fake
def _(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    return _like_outputs(known_regions[key].forward)


@region_backward.register_fake
def _(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    backward = known_regions[key].backward
    assert backward is not None
    return _like_outputs(backward)


def _like_outputs(graph: GraphModule) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in returned(graph)]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.key = inputs
    found = known_regions[ctx.key]
    ctx.inputs = len(tensors)
    ctx.save_for_backward(*(tensors[i] if i >= 0 else output[~i] for i in found.saved))
    ctx.shapes = [output[i] for i in found.differentiable]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for i, t in enumerate(output) if i not in found.differentiable))


def _gradients(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None]:
    found = known_regions[ctx.key]
    given = [grads[i] for i in found.differentiable]
    tangents = [torch.zeros_like(t) if g is None else g for g, t in zip(given, ctx.shapes, strict=True)]
    made = torch.ops.torch_tpu.region_backward([*ctx.saved_tensors, *tangents], ctx.key)
    results: list[torch.Tensor | None] = [None] * ctx.inputs
    for i, gradient in zip(found.gradients, made, strict=True):
        results[i] = gradient
    return results, None


region.register_autograd(_gradients, setup_context=_remember)

# --- AOTAutograd's graphs ----------------------------------------------------------------------------------------


def expand(graph: GraphModule) -> GraphModule:
    """Puts calls of the parts' graphs in place of the operators that stand for them, in place."""
    for target in (torch.ops.torch_tpu.region.default, torch.ops.torch_tpu.region_backward.default):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            arguments: Any = node.args
            tensors, key = arguments
            found = known_regions[key]
            is_forward = target is torch.ops.torch_tpu.region.default
            name = f"region_{key}_{'forward' if is_forward else 'backward'}"
            setattr(graph, name, found.forward if is_forward else found.backward)
            with graph.graph.inserting_before(node):
                part = graph.graph.get_attr(name)
                call = graph.graph.call_function(_invoke, (part, name, *tensors))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        # What is left of a write behind a part: its result is the new value, as it is.
        _, value = node.args
        source = value.args[0] if value.target is operator.getitem else value
        if is_call(source) and value.meta["val"].stride() == node.meta["val"].stride():
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def inline_writing(graph: GraphModule) -> None:
    """Puts parts that write to their inputs in place of the calls of their graphs, in an expanded graph.

    Only where a program sees how a new value comes from the old one can it write in place.
    """
    for call in filter(is_call, list(graph.graph.nodes)):
        part, name, *tensors = call.args
        if not _called(call).written or not name.endswith("forward"):
            continue
        inside: GraphModule = getattr(graph, part.target)
        known = dict(zip(inside.graph.find_nodes(op="placeholder"), tensors, strict=True))
        with graph.graph.inserting_before(call):
            outputs: Any = graph.graph.graph_copy(inside.graph, known)
        for original, node in known.items():
            if original.op == "get_attr":
                node.target = f"{name}_{original.target}"
                setattr(graph, node.target, getattr(inside, str(original.target)))
        for pick in list(call.users):
            pick.replace_all_uses_with(outputs[pick.args[1]])
            graph.graph.erase_node(pick)
        graph.graph.erase_node(call)
    graph.recompile()


def recomputing_calls(graph: GraphModule) -> list[tuple[Node, int]]:
    """The calls of parts' backward graphs that compute again, in an expanded graph, and of how many gradients each."""
    found = []
    for call in filter(is_call, graph.graph.nodes):
        region = _called(call)
        backward = region.backward if str(call.args[1]).endswith("backward") else None
        if backward is not None and backward.graph.find_nodes(op="call_function", target=after):
            found.append((call, len(region.differentiable)))
    return found


def _called(call: Node) -> OutlinedPart:
    return known_regions[int(str(call.args[1]).split("_")[1])]


def is_call(node: Node) -> bool:
    """Whether a node of an expanded graph is a call of a part's graph: of that, its name and the part's inputs."""
    return node.target is _invoke and str(node.args[1]).startswith("region_")
