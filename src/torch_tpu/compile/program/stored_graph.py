"""A graph of ATen operators as bytes: how a later process gets it back, and what it is called in every process.

Equal bytes mean equal graphs. Lines of the user's script and fake values are left out.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from torch_tpu.compile.program.node_value import META, NodeValue, node_value

# Operators whose meaning is that of a version of PyTorch or of this package.
NAMESPACES = ("aten", "prims", "torch_tpu")
_MODULES = ("operator", "_operator", "math", "builtins", "torch", __name__)


class UnstorableGraph(Exception):
    """The graph holds what may mean something else in another process, such as an operator of the user's."""


class _Place:
    """The node at a place of its graph."""

    def __init__(self, index: int) -> None:
        self.index = index


def dump(graph: GraphModule) -> bytes:
    """The graph as bytes.

    Raises:
        Unstorable: where a later process may not get the same graph back.
    """
    buffer = io.BytesIO()
    try:
        with unset_fake_temporarily():
            _Pickler(buffer, protocol=5).dump(graph)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnstorableGraph(str(error)) from error
    return buffer.getvalue()


def load(code: bytes) -> GraphModule:
    """The graph that `dump` gave as these bytes."""
    with unset_fake_temporarily():
        graph: GraphModule = pickle.loads(code)
    return graph


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        try:
            return self._reduced(value)
        except (TypeError, AttributeError) as error:
            # Such errors of pickle's mean that the graph has no form as bytes; one of this file is none of them.
            raise AssertionError(f"internal error of torch_tpu: {type(value).__name__} in a graph: {error}") from error

    def _reduced(self, value: Any) -> Any:
        if isinstance(value, GraphModule):
            return _graph, _parts(value)
        if isinstance(value, OpOverload):
            if value.namespace not in NAMESPACES:
                raise UnstorableGraph(f"{value} is not an operator of PyTorch")
            return _overload, (value.namespace, value._opname, value._overloadname)
        if isinstance(value, HigherOrderOperator) and type(value).__module__.startswith("torch."):
            return _higher_order, (value.name(),)
        if isinstance(value, torch.Tensor):
            return _constant, _contents(value)
        module = value.__module__ if isinstance(value, type) or callable(value) else type(value).__module__
        if str(module).partition(".")[0] not in _MODULES and module != __name__:
            raise UnstorableGraph(f"{value!r} is not of PyTorch")
        return NotImplemented


def _parts(graph: GraphModule) -> tuple[list[Any], dict[str, Any]]:
    places = {node: _Place(i) for i, node in enumerate(graph.graph.nodes)}

    def place(value: Any) -> Any:
        return places[value] if isinstance(value, Node) else value

    nodes = [
        (n.op, n.name, n.target, _mapped(n.args, place), _mapped(n.kwargs, place), tuple(node_value(n))) for n in places
    ]
    names = dict.fromkeys(str(n.target) for n in places if n.op in ("get_attr", "call_module"))
    return nodes, {name: attrgetter(name)(graph) for name in names}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument of a node with something else in place of each leaf."""
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(item, change) for item in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return change(value)


def _contents(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, FakeTensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnstorableGraph(f"a {type(tensor).__name__} is part of the graph")
    host = tensor.detach().resolve_conj().resolve_neg().cpu()
    content = host.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content, host.dtype, tuple(host.shape), torch.empty_like(host).stride(), tensor.device.type


# --- reading -----------------------------------------------------------------------------------------------------


def _graph(nodes: list[Any], attributes: dict[str, Any]) -> GraphModule:
    graph, root = Graph(), torch.nn.Module()
    made: list[Node] = []

    def node_at(value: Any) -> Any:
        return made[value.index] if isinstance(value, _Place) else value

    for name, value in attributes.items():
        _set(root, name, value)
    for op, name, target, args, kwargs, of in nodes:
        node = graph.create_node(op, target, _mapped(args, node_at), _mapped(kwargs, node_at), name)
        node.meta[META] = NodeValue(*of)
        made.append(node)
    return GraphModule(root, graph)


def _set(root: torch.nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            setattr(root, part, torch.nn.Module())
        root = getattr(root, part)
    setattr(root, last, value)


def _overload(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    import torch._higher_order_ops  # which registers them

    return getattr(torch.ops.higher_order, name)


def _constant(content: bytes, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> Any:
    host = (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    )
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return made.copy_(host)
