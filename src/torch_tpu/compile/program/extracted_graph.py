"""Some nodes of a graph as a graph by themselves."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node


class Piece:
    """A piece of a graph.

    Attributes:
        inputs: the nodes outside of it that it reads, in order of first use; constants are its own.
        results: those of its nodes that it returns.
        module: takes the inputs in their order, returns the results in theirs.
    """

    def __init__(self, graph: GraphModule, nodes: Sequence[Node], results: Sequence[Node]) -> None:
        inside = set(nodes)
        used = [n for node in nodes for n in node.all_input_nodes]
        self.inputs = list(dict.fromkeys(n for n in used if n not in inside and n.op != "get_attr"))
        self.results = list(results)
        copy, copies = Graph(), {}
        for node in self.inputs:
            copies[node] = copy.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in [*dict.fromkeys(n for n in used if n.op == "get_attr"), *nodes]:
            copies[node] = copy.node_copy(node, copies.__getitem__)
        copy.output(tuple(copies[n] for n in self.results))
        self.module = GraphModule(graph, copy)


def owner(node: Node) -> Node:
    """The node that a result is picked from, or the node itself: tuples don't leave a piece."""
    while node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].op == "call_function":
        node = node.args[0]
    return node


def attribute(graph: GraphModule, node: Node) -> object:
    """The constant that a `get_attr` node of a graph stands for."""
    value: object = operator.attrgetter(str(node.target))(graph)
    return value
