"""Cuts a graph in two around a node that no program can express: an opaque operator, a size that data decides."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torch_tpu.compile.program.extracted_graph import Piece, attribute, owner

# Makes what runs a piece of a graph, of that and whether it comes before the node.
Compile = Callable[[GraphModule, bool], Callable[..., Sequence[Any]]]


def is_worth_it(graph: GraphModule, node: Node) -> bool:
    """Whether the graph has anything but the node for a program to do."""
    others = [n for n in graph.graph.nodes if n.op == "call_function" and owner(n) is not node]
    return any(n.target is not operator.getitem for n in others)


class Cut:
    """A graph as two programs and a node that runs between them."""

    def __init__(self, graph: GraphModule, node: Node, compile_piece: Compile) -> None:
        nodes = list(graph.graph.nodes)
        place = {n: i for i, n in enumerate(nodes)}
        self._graph = graph
        self._node = node
        self._picks = [n for n in nodes if n is not node and owner(n) is node]
        self._arguments = graph.graph.find_nodes(op="placeholder")
        self._outputs: Any = graph.graph.output_node().args[0]
        calls = [n for n in nodes if n.op == "call_function" and owner(n) is not node]
        before = [n for n in calls if place[owner(n)] < place[node]]
        after = [n for n in calls if place[owner(n)] > place[node]]
        late = set(after)
        wanted: dict[Node, None] = {}
        for user in [node, *after]:
            wanted.update(dict.fromkeys(n for n in user.all_input_nodes if n not in late))
        map_arg(self._outputs, lambda n: wanted.setdefault(n))
        self._first = _Program(graph, before, [n for n in before if n in wanted], compile_piece, True)
        results = {n: None for n in _nodes(self._outputs) if n in late}
        self._second = _Program(graph, after, list(results), compile_piece, False)

    def __call__(self, *args: Any) -> list[Any]:
        values: dict[Node, Any] = dict(zip(self._arguments, args, strict=True))
        self._first.run(values)
        node_args, node_kwargs = map_arg((self._node.args, self._node.kwargs), lambda n: _value(self._graph, n, values))
        target: Any = self._node.target
        values[self._node] = target(*node_args, **node_kwargs)
        for pick in self._picks:
            values[pick] = values[pick.args[0]][pick.args[1]]
        self._second.run(values)
        return list(map_arg(self._outputs, values.__getitem__))


class _Program:
    """A piece of the graph and what runs it; nothing where it has no nodes."""

    def __init__(
        self, graph: GraphModule, nodes: Sequence[Node], results: list[Node], compile_piece: Compile, is_first: bool
    ) -> None:
        self._piece = Piece(graph, nodes, results)
        self._run = compile_piece(self._piece.module, is_first) if nodes else None

    def run(self, values: dict[Node, Any]) -> None:
        """Adds what the nodes return to what is known."""
        if self._run is not None:
            results = self._run(*(values[n] for n in self._piece.inputs))
            values.update(zip(self._piece.results, results, strict=True))


def _nodes(outputs: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(outputs, found.append)
    return found


def _value(graph: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    return attribute(graph, node) if node.op == "get_attr" else values[node]
