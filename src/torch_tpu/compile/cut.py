"""Cuts a graph in two around a node that no program can express: an opaque operator, a size that data decides."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

# Makes what runs a piece of a graph, of that and whether it comes before the node.
Compile = Callable[[GraphModule, bool], Callable[..., Sequence[Any]]]


def is_worth_it(graph: GraphModule, node: Node) -> bool:
    """Whether the graph has anything but the node for a program to do."""
    others = [n for n in graph.graph.nodes if n.op == "call_function" and _piece_of(n) is not node]
    return any(n.target is not operator.getitem for n in others)


class Cut:
    """A graph as two programs and a node that runs between them."""

    def __init__(self, graph: GraphModule, node: Node, compile_piece: Compile) -> None:
        nodes = list(graph.graph.nodes)
        place = {n: i for i, n in enumerate(nodes)}
        self._graph = graph
        self._node = node
        self._picks = [n for n in nodes if n is not node and _piece_of(n) is node]
        self._arguments = graph.graph.find_nodes(op="placeholder")
        self._outputs: Any = graph.graph.output_node().args[0]
        calls = [n for n in nodes if n.op == "call_function" and _piece_of(n) is not node]
        before = [n for n in calls if place[_piece_of(n)] < place[node]]
        after = [n for n in calls if place[_piece_of(n)] > place[node]]
        late = set(after)
        wanted: dict[Node, None] = {}
        for user in [node, *after]:
            wanted.update(dict.fromkeys(n for n in user.all_input_nodes if n not in late))
        map_arg(self._outputs, lambda n: wanted.setdefault(n))
        self._first = _Piece(graph, before, [n for n in before if n in wanted], compile_piece, True)
        results = {n: None for n in _nodes(self._outputs) if n in late}
        self._second = _Piece(graph, after, list(results), compile_piece, False)

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


class _Piece:
    """Some nodes of a graph as a graph by themselves."""

    def __init__(
        self, graph: GraphModule, nodes: Sequence[Node], results: list[Node], compile_piece: Compile, is_first: bool
    ) -> None:
        inside = set(nodes)
        used = [n for node in nodes for n in node.all_input_nodes]
        self._inputs = list(dict.fromkeys(n for n in used if n not in inside and n.op != "get_attr"))
        self._results = results
        copy, copies = Graph(), {}
        for node in self._inputs:
            copies[node] = copy.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in [*dict.fromkeys(n for n in used if n.op == "get_attr"), *nodes]:
            copies[node] = copy.node_copy(node, copies.__getitem__)
        copy.output(tuple(copies[n] for n in results))
        self._run = compile_piece(GraphModule(graph, copy), is_first) if nodes else None

    def run(self, values: dict[Node, Any]) -> None:
        """Adds what the nodes return to what is known."""
        if self._run is not None:
            values.update(zip(self._results, self._run(*(values[n] for n in self._inputs)), strict=True))


def _piece_of(node: Node) -> Node:
    """The node that a result is picked from, or the node itself: tuples don't leave a piece."""
    while node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].op == "call_function":
        node = node.args[0]
    return node


def _nodes(outputs: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(outputs, found.append)
    return found


def _value(graph: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    return operator.attrgetter(str(node.target))(graph) if node.op == "get_attr" else values[node]
