"""Equal parts of a graph are differentiated, traced and lowered once, and called as often as they occur.

Dynamo's graph gets one opaque operator, `torch_tpu::region`, in place of each copy (`outline`). AOTAutograd, whose cost
grows with the number of nodes, sees only that. In the graphs it makes, each becomes a call of the part's forward or
backward graph (`expand`), which the tracer turns into one function of the program, called N times.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node

from torch_tpu import metrics
from torch_tpu.compile.repetition import Part, repeated
from torch_tpu.ops.schema import signature

_invoke: Any = torch.ops.higher_order.invoke_subgraph
_numbers = itertools.count()
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


class Region:
    """A repeated part.

    Attributes:
        forward: takes the part's inputs; returns its outputs, then what backward needs and is no input.
        outputs: how many of them are outputs.
        saved: for each value backward takes: the input it is, or ~n for entry n of what forward returns.
        differentiable: which outputs backward takes a gradient of, behind the saved values.
        backward: returns the gradients of `gradients`, some of the inputs. None where nothing needs a gradient.
    """

    def __init__(
        self,
        forward: GraphModule,
        outputs: int,
        saved: tuple[int, ...] = (),
        differentiable: tuple[int, ...] = (),
        backward: GraphModule | None = None,
        gradients: tuple[int, ...] = (),
    ) -> None:
        self.key = next(_numbers)
        self.forward = forward
        self.outputs = outputs
        self.saved = saved
        self.differentiable = differentiable
        self.backward = backward
        self.gradients = gradients
        _regions[self.key] = self


# --- Dynamo's graph ----------------------------------------------------------------------------------------------


def outline(graph: GraphModule) -> tuple[GraphModule, Region | None]:
    """A copy of Dynamo's graph with an operator in place of each of its equal parts, and what that stands for.

    The graph itself and None where it has no equal parts, or where they can't be handled apart: they write to their
    inputs, or return views of them.
    """
    parts = repeated(graph.graph)
    if not parts or not all(_is_on_device(n) for n in (*parts[0].inputs, *parts[0].outputs)):
        return graph, None
    try:
        region = _differentiate(graph, parts[0])
    except RuntimeError:
        # They write to their inputs, return views of them, or hold an operator that is not PyTorch's.
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
    return GraphModule(graph, copy), region


def _differentiate(graph: GraphModule, part: Part) -> Region:
    """Raises RuntimeError where AOTAutograd finds that the part writes to its inputs or returns views of them."""
    copy = Graph()
    known = {n: copy.placeholder(n.name) for n in part.inputs}
    for node in part.nodes:
        known[node] = copy.node_copy(node, known.__getitem__)
    copy.output(tuple(known[n] for n in part.outputs))
    examples = [n.meta["example_value"] for n in part.inputs]
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in examples)
    mode = detect_fake_mode(examples)
    assert mode is not None
    with mode:
        given = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).requires_grad_(t.requires_grad)
            for t in examples
        ]
    # The context of the graph outside must not learn of this one.
    with tracing(TracingContext(mode)):
        joint = aot_export_joint_simple(GraphModule(graph, copy), tuple(given), trace_joint=needs_gradients)
    assert isinstance(joint, GraphModule)
    targets = [n.target for n in joint.graph.nodes]
    if any(isinstance(t, torch._ops.OpOverload) and t.namespace not in ("aten", "prims") for t in targets):
        raise RuntimeError("operators of others may have to run between programs")
    outputs = len(part.outputs)
    if not needs_gradients:
        return Region(joint, outputs)
    forward, backward = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=outputs)
    inputs = {n: i for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    returned = _returned(forward)
    kept = returned[:outputs]
    roots, backward = _save_roots(returned[outputs:], backward)
    saved = []
    for value in roots:
        if value in inputs:
            saved.append(inputs[value])
        else:
            kept.append(value)
            saved.append(~(len(kept) - 1))
    _return(forward, kept)
    gradients = _returned(backward)
    places = tuple(i for i, g in enumerate(gradients) if g is not None)
    _return(backward, [gradients[i] for i in places])
    differentiable = tuple(i for i, n in enumerate(part.outputs) if n.meta["example_value"].requires_grad)
    if len(backward.graph.find_nodes(op="placeholder")) != len(saved) + len(differentiable):
        raise RuntimeError("the partitioner saved something that is no value of the forward graph")
    return Region(forward, outputs, tuple(saved), differentiable, backward, places)


def _is_on_device(node: Node) -> bool:
    return node.meta["example_value"].device.type == "tpu"


def _returned(graph: GraphModule) -> list[Any]:
    """The nodes that a graph returns, None where it returns None."""
    outputs: Any = graph.graph.output_node().args[0]
    return list(outputs)


def _return(graph: GraphModule, nodes: Sequence[Node]) -> None:
    graph.graph.output_node().args = (tuple(nodes),)
    graph.recompile()


def _save_roots(saved: Sequence[Node], backward: GraphModule) -> tuple[list[Node], GraphModule]:
    """What has to be saved so that backward can make the saved values that are views itself; backward with these views.

    A function of the program returns new values: a view of a weight would become a copy of it.
    """
    chains = [_views(value) for value in saved]
    copy = Graph()
    placeholders = backward.graph.find_nodes(op="placeholder")
    values = {root: copy.placeholder(root.name) for root in dict.fromkeys(chain[0] for chain in chains)}
    roots = list(values)
    for root, placeholder in values.items():
        placeholder.meta = dict(root.meta)
    known = {p: copy.node_copy(p) for p in placeholders[len(saved) :]}
    for placeholder, chain in zip(placeholders, chains, strict=False):
        for node in chain[1:]:
            if node not in values:
                values[node] = copy.node_copy(node, values.__getitem__)
        known[placeholder] = values[chain[-1]]
    for node in backward.graph.nodes:
        if node not in known:
            known[node] = copy.node_copy(node, known.__getitem__)
    return roots, GraphModule(backward, copy)


def _views(value: Node) -> list[Node]:
    """The nodes that lead to a value by nothing but views, from the one that is no view on."""
    chain = [value]
    while len(chain[0].all_input_nodes) == 1:
        node, source = chain[0], chain[0].all_input_nodes[0]
        made_by = source if node.target is operator.getitem else node
        if not isinstance(made_by.target, torch._ops.OpOverload) or not signature(made_by.target).is_view:
            break
        chain.insert(0, source)
    return chain


# --- the operator ------------------------------------------------------------------------------------------------

_RANDOM = (torch.Tag.nondeterministic_seeded,)  # copies may draw random numbers, so equal calls are not the same


@torch.library.custom_op("torch_tpu::region", mutates_args=(), tags=_RANDOM)
def region(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    return list(_regions[key].forward(*tensors))


@torch.library.custom_op("torch_tpu::region_backward", mutates_args=(), tags=_RANDOM)
def region_backward(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    backward = _regions[key].backward
    assert backward is not None
    return list(backward(*tensors))


@region.register_fake
def _(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    return _like_outputs(_regions[key].forward)


@region_backward.register_fake
def _(tensors: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    backward = _regions[key].backward
    assert backward is not None
    return _like_outputs(backward)


def _like_outputs(graph: GraphModule) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in _returned(graph)]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.key = inputs
    found = _regions[ctx.key]
    ctx.inputs = len(tensors)
    ctx.save_for_backward(*(tensors[i] if i >= 0 else output[~i] for i in found.saved))
    ctx.shapes = [output[i] for i in found.differentiable]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for i, t in enumerate(output) if i not in found.differentiable))


def _gradients(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None]:
    found = _regions[ctx.key]
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
            found = _regions[key]
            is_forward = target is torch.ops.torch_tpu.region.default
            name = f"region_{key}_{'forward' if is_forward else 'backward'}"
            setattr(graph, name, found.forward if is_forward else found.backward)
            with graph.graph.inserting_before(node):
                part = graph.graph.get_attr(name)
                call = graph.graph.call_function(_invoke, (part, name, *tensors))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def is_call(node: Node) -> bool:
    """Whether a node of an expanded graph is a call of a part's graph: of that, its name and the part's inputs."""
    return node.target is _invoke and str(node.args[1]).startswith("region_")
