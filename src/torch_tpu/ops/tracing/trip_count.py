"""How often a `while_loop` runs, where that follows from constants: the host runs its counter without the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from torch_tpu.hlo import array as hlo
from torch_tpu.ops.tracing.tracer import Tracer

# Longer loops take too long to count.
_MOST = 2**14


def trip_count(
    tracer: Tracer, condition: GraphModule, body: GraphModule, carried: Sequence[Any], additional: Sequence[Any]
) -> int | None:
    """How often `body` runs; None where that depends on data or is more than 2¹⁴."""
    deciding = _deciding(condition, body, len(carried))
    operands = [*carried, *additional]
    state: dict[int, Any] = {}
    for i in deciding:
        value = _known(tracer, operands[i])
        if value is None:
            return None
        state[i] = value
    test, steps = _results(condition)[0], _results(body)
    try:
        for count in range(_MOST):
            if not _Evaluation(condition, state).value(test):
                return count
            evaluation = _Evaluation(body, state)
            state = {i: evaluation.value(steps[i]) if i < len(carried) else v for i, v in state.items()}
    except _Opaque:
        pass
    return None


def _deciding(condition: GraphModule, body: GraphModule, carried: int) -> set[int]:
    """The operands that decide when the loop ends."""
    found = _operands(condition, _results(condition))
    while True:
        new = _operands(body, [_results(body)[i] for i in found if i < carried]) - found
        if not new:
            return found
        found |= new


def _results(graph: GraphModule) -> list[Any]:
    return tree_leaves(graph.graph.output_node().args[0])


def _operands(graph: GraphModule, results: Sequence[Any]) -> set[int]:
    """The positions of the inputs that these results depend on."""
    positions = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    return {positions[n] for n in _ancestors(results) if n in positions}


def _ancestors(results: Sequence[Any]) -> Iterator[Node]:
    waiting = [n for n in results if isinstance(n, Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        waiting.extend(new)


def _known(tracer: Tracer, value: Any) -> Any:
    """A constant of the program as the host's; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = hlo.known_number(tracer.read(value))
        return None if number is None else torch.full(value.shape, number, dtype=value.dtype)
    return None


class _Opaque(Exception):
    """Something in the graph that only the program can compute."""


class _Evaluation:
    """One run of a graph, of which only what is asked for is computed."""

    def __init__(self, graph: GraphModule, operands: dict[int, Any]) -> None:
        places = graph.graph.find_nodes(op="placeholder")
        self.values: dict[Node, Any] = {places[i]: value for i, value in operands.items()}

    def value(self, node: Any) -> Any:
        if not isinstance(node, Node):
            return node
        if node not in self.values:
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                raise _Opaque
            given = map_arg((node.args, node.kwargs), self.value)
            args, kwargs = tree_map(lambda v: torch.device("cpu") if isinstance(v, torch.device) else v, given)
            self.values[node] = node.target(*args, **kwargs)
        return self.values[node]
