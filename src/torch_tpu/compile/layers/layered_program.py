"""A graph with many equal layers as a sequence of programs: one for the layers, launched for each, and those around.

XLA inlines functions, so the time in which it compiles one program of N equal layers grows with N. What lies before the
layers, between two of them and after them are programs too; equal ones are one. Tensors that no later program reads are
let go on the way, as a single program does with its temporaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torch_tpu.compile.layers import outline
from torch_tpu.compile.layers.roofline import least_seconds
from torch_tpu.compile.program import stored_graph
from torch_tpu.compile.program.extracted_graph import Piece, attribute, owner
from torch_tpu.compile.program.graph_program import GraphProgram, Stored, facts_of
from torch_tpu.compile.program.node_value import node_value
from torch_tpu.metrics import programs
from torch_tpu.runtime.process_client import client

Run = Callable[..., Sequence[Any]]

# Fewer layers compile faster than it pays to run them one by one.
LEAST_LAYERS = 8
# A launch takes the host some 0.1 ms for a layer's tensors; it does so while the layer before runs, if that takes long.
LEAST_SECONDS = 5e-4

_WRITE: Any = torch.ops.aten.copy_.default


class Stage:
    """One program of the sequence.

    Attributes:
        inputs: the nodes of the whole graph that it reads; `released` are those that nothing after it does.
        results: the nodes it computes, with their place in what `run` returns.
    """

    def __init__(self, run: Run, inputs: Sequence[Node], results: Sequence[tuple[int, Node]]) -> None:
        self.run = run
        self.inputs = inputs
        self.results = results
        self.released: list[Node] = []


class Layers:
    """Runs a graph in stages. It is called with a list of arguments and empties it, so that they are let go early."""

    def __init__(self, graph: GraphModule | Stored, title: str) -> None:
        """
        Args:
            graph: its layers are calls of private graphs, as `regions.expand` leaves them.
            title: its name in reports.
        """
        self._given = graph
        whole = graph if isinstance(graph, GraphModule) else stored_graph.load(graph.code)
        self._arguments = whole.graph.find_nodes(op="placeholder")
        self._outputs: Any = whole.graph.output_node().args[0]
        self._constants = {n: attribute(whole, n) for n in whole.graph.find_nodes(op="get_attr")}
        parts = _parts(whole)
        made: dict[Any, Run] = {}
        identity = self._identity()
        self._stages = [_stage(whole, part, f"{title}, {_name(part, parts)}", identity, made) for part in parts]
        kept = set(self._constants)
        map_arg(self._outputs, kept.add)
        for stage in reversed(self._stages):
            stage.released = [n for n in {*stage.inputs, *(n for _, n in stage.results)} if n not in kept]
            kept.update(stage.released)
        programs.layered(title, sum(_is_layer(part[0]) for part in parts), len(made))

    def stored(self) -> Stored:
        """The graph for a later process.

        Raises:
            Unstorable: where that might not get the same one back.
        """
        if isinstance(self._given, GraphModule):
            self._given = Stored(stored_graph.dump(self._given), facts_of(self._given))
        return self._given

    def _identity(self) -> str:
        if client().disk_cache is None:
            return ""
        try:
            return hashlib.sha256(self.stored().code).hexdigest()
        except stored_graph.UnstorableGraph:
            return ""

    def __call__(self, args: list[Any]) -> list[Any]:
        values = {**self._constants, **dict(zip(self._arguments, args, strict=True))}
        args.clear()
        for stage in self._stages:
            given = [values[n] for n in stage.inputs]
            returned = stage.run(*given)
            del given
            for i, node in stage.results:
                values[node] = returned[i]
            del returned
            for node in stage.released:
                del values[node]
        return list(map_arg(self._outputs, values.__getitem__))


def are_worth_it(graph: GraphModule) -> bool:
    """Whether a graph has so many and so large equal layers that each is better launched by itself."""
    parts = _parts(graph)
    layers = [part[0] for part in parts if _is_layer(part[0])]
    if len(layers) < LEAST_LAYERS:
        return False
    # Before, after and between; more would compile as slowly as one program.
    others = {_code(part, []) for part in parts if not _is_layer(part[0])}
    few = len(others) <= 2 + len(layers) // LEAST_LAYERS
    return few and least_seconds(_called(graph, layers[0])) >= LEAST_SECONDS


def _parts(graph: GraphModule) -> list[list[Node]]:
    """The nodes of each stage, in order: a layer, or all that lies between two."""
    parts: list[list[Node]] = []
    of: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        whose = _writer(node) or owner(node)
        if whose is not node:
            of[whose].append(node)
            continue
        if not parts or _is_layer(node) or _is_layer(parts[-1][0]):
            parts.append([])
        parts[-1].append(node)
        of[node] = parts[-1]
    return parts


def _is_layer(node: Node) -> bool:
    return outline.is_call(node)


def _writer(node: Node) -> Node | None:
    """The layer that computes what a node writes to an argument, if it can as well write it itself.

    It can where nothing else reads the argument, which has its new value earlier then.
    """
    if node.target is not _WRITE or node.users:
        return None
    written, value = cast("list[Node]", node.args[:2])
    layer = owner(value)
    is_apart = written.op == "placeholder" and all(n in (layer, node) or n.op == "output" for n in written.users)
    if not is_apart or layer is value or not _is_layer(layer) or layer.args.count(written) != 1:
        return None
    return layer


def _called(graph: GraphModule, layer: Node) -> GraphModule:
    return cast("GraphModule", attribute(graph, cast("Node", layer.args[0])))


def _name(part: list[Node], parts: list[list[Node]]) -> str:
    if _is_layer(part[0]):
        return "one layer"
    return "before the layers" if part is parts[0] else "after the layers" if part is parts[-1] else "between layers"


def _stage(graph: GraphModule, part: list[Node], title: str, identity: str, made: dict[Any, Run]) -> Stage:
    """The stage of a part, which runs the program in `made` if there is one that does the same."""
    if _is_layer(part[0]):
        layer, *rest = part
        called, inputs = _called(graph, layer), cast("list[Node]", layer.args[2:])
        writes = [n for n in rest if n.target is _WRITE]
        picks = [n for n in rest if n.target is not _WRITE and not set(writes).issuperset(n.users)]
        place = {n: cast("int", n.args[1]) for n in rest if n.target is not _WRITE}
        pairs = (cast("list[Node]", n.args[:2]) for n in writes)
        written = tuple((inputs.index(argument), place[value]) for argument, value in pairs)
        returned = tuple(place[n] for n in picks)
        key: Any = called, written, returned
        module = _writing(called, written, returned) if key not in made else called
        results = list(enumerate(picks))
    else:
        inside = set(part)
        piece = Piece(graph, part, [n for n in part if not inside.issuperset(n.users)])
        module, inputs, results = piece.module, piece.inputs, list(enumerate(piece.results))
        key = _code(part, piece.results)
    if key not in made:
        made[key] = GraphProgram(module, title, True, f"{identity}, program {len(made)}" if identity else "")
    return Stage(made[key], inputs, results)


def _writing(module: GraphModule, written: Sequence[tuple[int, int]], returned: Sequence[int]) -> GraphModule:
    """A layer that writes some of its outputs to arguments.

    Args:
        written: places of an argument and of the output that it is to hold.
        returned: places of the outputs that are results.
    """
    copy = Graph()
    known: dict[Node, Node] = {}
    outputs: Any = copy.graph_copy(module.graph, known)
    arguments = copy.find_nodes(op="placeholder")
    for place, output in written:
        copy.call_function(_WRITE, (arguments[place], outputs[output])).meta = dict(arguments[place].meta)
    copy.output(tuple(outputs[i] for i in returned))
    return GraphModule(module, copy)


def _code(nodes: Sequence[Node], results: Sequence[Node]) -> tuple[Any, ...]:
    """What nodes compute, in terms of themselves and of what they read: equal codes are the same function."""
    place: dict[Node, str] = {n: f"<{i}>" for i, n in enumerate(nodes)}

    def described(node: Node) -> str:
        if node.op == "get_attr":
            return str(node.target)
        return place.setdefault(node, f"<input {len(place)} on {node_value(node).device}>")

    code = [(n.target, repr(map_arg((n.args, n.kwargs), described))) for n in nodes]
    return (*code, *(place[n] for n in results))
