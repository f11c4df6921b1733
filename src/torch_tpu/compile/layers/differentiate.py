"""A repeated part of Dynamo's graph as graphs of its forward and its backward pass, each without side effects."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.collect_metadata_analysis import run_functionalized_fw_and_collect_metadata
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from torch_tpu.compile.layers.repetition import RepeatedPart
from torch_tpu.compile.program.recompute import delay_recomputation, partition
from torch_tpu.ops.core.schema import signature

_numbers = itertools.count()
known_regions: weakref.WeakValueDictionary[int, OutlinedPart] = weakref.WeakValueDictionary()


class OutlinedPart:
    """A repeated part.

    Attributes:
        forward: takes the part's inputs; returns its outputs, the new values of inputs that it writes to, then what
            backward needs and is no input.
        outputs: how many of them are outputs; `written` are the inputs that it writes to.
        saved: for each value backward takes: the input it is, or ~n for entry n of what forward returns.
        differentiable: which outputs backward takes a gradient of, behind the saved values.
        backward: returns the gradients of `gradients`, some of the inputs. None where nothing needs a gradient.
    """

    def __init__(
        self,
        forward: GraphModule,
        outputs: int,
        written: tuple[int, ...] = (),
        saved: tuple[int, ...] = (),
        differentiable: tuple[int, ...] = (),
        backward: GraphModule | None = None,
        gradients: tuple[int, ...] = (),
    ) -> None:
        self.key = next(_numbers)
        self.forward = forward
        self.outputs = outputs
        self.written = written
        self.saved = saved
        self.differentiable = differentiable
        self.backward = backward
        self.gradients = gradients
        known_regions[self.key] = self


class LeftAlone(Exception):
    """Equal parts can't be handled once, and why."""


def differentiate(graph: GraphModule, part: RepeatedPart) -> OutlinedPart:
    """
    Raises:
        LeftAlone: where AOTAutograd finds that the part returns views of its inputs, where backward needs what it
            overwrites, or where it holds an operator that is not PyTorch's.
    """
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
        try:
            written = _written(_module(graph, part, ()), given, mode)
            joint = aot_export_joint_simple(_module(graph, part, written), tuple(given), trace_joint=needs_gradients)
        except RuntimeError as error:  # what AOTAutograd raises
            raise LeftAlone(str(error)) from error
        assert isinstance(joint, GraphModule)
        targets = [n.target for n in joint.graph.nodes]
        if any(isinstance(t, torch._ops.OpOverload) and t.namespace not in ("aten", "prims") for t in targets):
            raise LeftAlone("custom operators may have to run between programs")
        outputs = len(part.outputs)
        if not needs_gradients:
            return OutlinedPart(joint, outputs, written)
        _forget_unread_statistics(joint)
        returns = outputs + len(written)
        forward, backward = partition(joint, (), num_fwd_outputs=returns)
    inputs = {n: i for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    results = returned(forward)
    kept = results[:returns]
    roots, backward = _save_roots(results[returns:], backward)
    saved = []
    for value in roots:
        if value in inputs:
            saved.append(inputs[value])
        else:
            kept.append(value)
            saved.append(~(len(kept) - 1))
    if not set(written).isdisjoint(saved):
        raise LeftAlone("backward needs a value that forward overwrites")
    _return(forward, kept)
    gradients = returned(backward)
    places = tuple(i for i, g in enumerate(gradients) if g is not None)
    _return(backward, [gradients[i] for i in places])
    differentiable = tuple(i for i, n in enumerate(part.outputs) if n.meta["example_value"].requires_grad)
    if len(backward.graph.find_nodes(op="placeholder")) != len(saved) + len(differentiable):
        raise LeftAlone("the partitioner saved something that is no value of the forward graph")
    delay_recomputation(backward)
    return OutlinedPart(forward, outputs, written, tuple(saved), differentiable, backward, places)


def _module(graph: GraphModule, part: RepeatedPart, written: Sequence[int]) -> GraphModule:
    """The part as a module; copies of `written` inputs, to which it writes instead, are further results."""
    copy = Graph()
    known = {n: copy.placeholder(n.name) for n in part.inputs}
    for i in written:
        known[part.inputs[i]] = copy.call_method("clone", (known[part.inputs[i]],))
    for node in part.nodes:
        known[node] = copy.node_copy(node, known.__getitem__)
    copy.output((*(known[n] for n in part.outputs), *(known[part.inputs[i]] for i in written)))
    return GraphModule(graph, copy)


def _written(module: GraphModule, given: Sequence[torch.Tensor], mode: FakeTensorMode) -> tuple[int, ...]:
    """The inputs that a module writes to."""
    collect = run_functionalized_fw_and_collect_metadata(
        module, flat_args_descs=[PlainAOTInput(i) for i in range(len(given))], keep_input_mutations=False
    )
    with torch.autograd.set_multithreading_enabled(False), torch.random.fork_rng(devices=[]), mode:
        return tuple(collect(*given).mutated_inp_runtime_indices)


def check_written(part: RepeatedPart, written: Sequence[int]) -> None:
    """
    Raises:
        LeftAlone: where new values of these inputs can't be written behind the part.
    """
    examples = [n.meta["example_value"] for n in part.inputs]
    if any(examples[i].requires_grad for i in written):
        raise LeftAlone("the part writes to an input that needs a gradient")
    storages = [t.untyped_storage()._cdata for t in (*examples, *(n.meta["example_value"] for n in part.outputs))]
    if any(storages.count(storages[i]) > 1 for i in written):
        raise LeftAlone("the part writes to an input that shares its memory with another one, or with an output")


def _forget_unread_statistics(joint: GraphModule) -> None:
    """Takes from the gradient of batch_norm in training what it does not read, so that it may be overwritten."""
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        if node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def returned(graph: GraphModule) -> list[Any]:
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
