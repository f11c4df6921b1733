"""Finds the repeated parts of a graph, such as the equal layers of a transformer.

Each node gets a label that equal nodes share. A period is a distance at which labels repeat; of all periods and places
the one that covers most of the graph counts, cut where the fewest values cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

# Fewer or smaller copies save less than it costs to handle them apart.
LEAST_COPIES = 4
LEAST_NODES = 6
# Operators of a graph inside, whose copies are equal where these graphs are. They take what a graph reads as operands.
_WITH_BODY = (torch.ops.higher_order.tag_activation_checkpoint,)
# A graph inside, the operator that runs it, and the result picked from that.
_LEAST_WITH_BODY = 3


@dataclass(frozen=True)
class RepeatedPart:
    """One copy: its nodes in order, what it takes from outside in order of first use, and what others use of it."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def repeated(graph: Graph) -> list[RepeatedPart]:
    """Parts of Dynamo's graph that do the same to inputs of the same shapes, dtypes and strides; none where there are
    fewer than `LEAST_COPIES`.

    Graphs with symbolic sizes, and graphs that switch autocast or autograd on the way, are left as they are.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    if any(_is_dynamic(n) for n in graph.nodes) or any(_changes_state(n) for n in nodes):
        return []
    bodies = {n: _body(graph, n) for n in nodes if n.op == "get_attr"}
    insides = [body.graph.nodes for body in bodies.values() if body is not None]
    if any(_is_dynamic(n) or _changes_state(n) for inside in insides for n in inside):
        return []
    codes = {n: body if body is None else _graph_code(body) for n, body in bodies.items()}
    labels: dict[Any, int] = {}
    numbers = np.array([labels.setdefault(_label(n, codes), len(labels)) for n in nodes], np.int64)
    sizes = [len(body.graph.nodes) if (body := bodies.get(n)) is not None else 1 for n in nodes]
    start, period, length = _longest(numbers, sizes)
    if not period:
        return []
    start, copies = _cut(nodes, start, period, length)
    parts = [nodes[start + k * period : start + (k + 1) * period] for k in range(copies)]
    by_code: defaultdict[Any, list[list[Node]]] = defaultdict(list)
    for part in parts:
        by_code[_code(part, codes)].append(part)
    equal = max(by_code.values(), key=len, default=[])
    if len(equal) < LEAST_COPIES:
        return []
    used = sorted(set().union(*(_used_outside(part) for part in equal)))
    if not used or not all(map(_is_tensor, [*(equal[0][i] for i in used), *_inputs(equal[0])])):
        return []
    return [RepeatedPart(tuple(part), tuple(_inputs(part)), tuple(part[i] for i in used)) for part in equal]


def _longest(numbers: npt.NDArray[np.int64], sizes: Sequence[int]) -> tuple[int, int, int]:
    """Start, period and length of the stretch whose repetitions cover most; period 0 if there is none.

    Args:
        sizes: how many nodes each stands for.
    """
    best, found = 0, (0, 0, 0)
    before = np.cumsum([0, *sizes])
    least = LEAST_NODES if before[-1] == len(sizes) else _LEAST_WITH_BODY
    for period in range(least, len(numbers) // LEAST_COPIES + 1):
        same = np.concatenate(([False], numbers[:-period] == numbers[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        begins, ends = edges[::2], edges[1::2]
        if not len(begins):
            continue
        k = int(np.argmax(ends - begins))
        length = int(ends[k] - begins[k]) + period
        first, count = int(begins[k]), length // period
        covered = int(before[first + count * period] - before[first + period])
        if covered > best and count >= LEAST_COPIES and before[first + period] - before[first] >= LEAST_NODES:
            best, found = covered, (first, period, length)
    return found


def _cut(nodes: Sequence[Node], start: int, period: int, length: int) -> tuple[int, int]:
    """Where the first copy begins and how many there are: so that the fewest values live on from one to the next."""
    place = {n: i for i, n in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for n, i in place.items():
        last = max((place.get(user, len(nodes)) for user in n.users), default=i)
        if last > i:
            # A tuple, or a graph inside, can't be the result of a part.
            weight = 1 if _is_tensor(n) else len(nodes)
            change[i + 1] += weight
            change[min(last + 1, len(nodes))] -= weight
    crossing = np.cumsum(change)
    shifts = range(min(period, length - LEAST_COPIES * period + 1))
    shift = min(shifts, key=lambda s: (crossing[start + s + period], -((length - s) // period), s))
    return start + shift, (length - shift) // period


def _code(part: Sequence[Node], codes: dict[Node, Any]) -> tuple[Any, ...]:
    """What a part computes, in terms of its own nodes and its inputs: equal codes are the same function."""
    place = {n: i for i, n in enumerate(part)}
    inputs = {n: i for i, n in enumerate(_inputs(part))}
    code = []
    for n in part:
        described = map_arg((n.args, n.kwargs), lambda a: f"<{place[a]}>" if a in place else f"<input {inputs[a]}>")
        code.append((n.op, codes.get(n) or _target(n), repr(described)))
    return (*code, *(_spec(n.meta.get("example_value")) for n in inputs))


def _body(graph: Graph, node: Node) -> GraphModule | None:
    """The graph inside that a node stands for, if all its users run it and it can be compared with others."""
    value: Any = attrgetter(str(node.target))(graph.owning_module)
    if not isinstance(value, GraphModule) or any(user.target not in _WITH_BODY for user in node.users):
        return None
    is_plain = all(n.op != "get_attr" and not isinstance(n.target, HigherOrderOperator) for n in value.graph.nodes)
    return value if is_plain else None


def _graph_code(body: GraphModule) -> tuple[Any, ...]:
    """What a graph without graphs inside computes, and which of its values checkpointing is told to keep."""
    place = {n: i for i, n in enumerate(body.graph.nodes)}
    code = [
        (
            n.op,
            "" if n.op in ("placeholder", "output") else _target(n),
            repr(map_arg((n.args, n.kwargs), lambda a: f"<{place[a]}>")),
            _spec(n.meta.get("example_value")),
        )
        for n in place
    ]
    return (*code, repr(body.meta.get("_checkpoint_context_fn")))


def _inputs(part: Sequence[Node]) -> list[Node]:
    own = set(part)
    return list(dict.fromkeys(a for n in part for a in n.all_input_nodes if a not in own))


def _used_outside(part: Sequence[Node]) -> set[int]:
    own = set(part)
    return {i for i, n in enumerate(part) if any(user not in own for user in n.users)}


def _label(node: Node, codes: dict[Node, Any]) -> Any:
    """Equal for nodes that do the same to values of the same kind."""
    if node.op == "get_attr":
        return codes[node] or node
    if node.op not in ("call_function", "call_method") or not _is_comparable(node):
        return node
    described = map_arg((node.args, node.kwargs), lambda a: f"<{_spec(a.meta.get('example_value'))}>")
    return node.op, _target(node), repr(described), _spec(node.meta.get("example_value"))


def _is_comparable(node: Node) -> bool:
    return node.target in _WITH_BODY or not isinstance(node.target, HigherOrderOperator)


def _target(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else f"{torch.typename(target)} {id(target)}"


def _spec(value: Any) -> str:
    """What can be known of a value before it is computed."""
    leaves = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            shape, strides = tuple(leaf.shape), leaf.stride()
            leaf = f"{leaf.dtype} {shape} {strides} {leaf.device} {leaf.requires_grad}"
        leaves.append(str(leaf))
    return ", ".join(leaves)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_dynamic(node: Node) -> bool:
    leaves = tree_leaves(node.meta.get("example_value"))
    sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    return any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in (*leaves, *sizes))


def _changes_state(node: Node) -> bool:
    """Whether a node makes something out of nothing that is no tensor: it switches autocast or autograd."""
    if node.op != "call_function" or node.all_input_nodes or node.target is torch._C._log_api_usage_once:
        return False
    leaves = tree_leaves(node.meta.get("example_value"))
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
