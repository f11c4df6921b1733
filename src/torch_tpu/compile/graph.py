"""A graph of ATen operators as a program: traced like one operator, found again by the shapes of its arguments."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from torch_tpu import metrics
from torch_tpu.eager import execute, hooks
from torch_tpu.eager.operator import checks_bounds
from torch_tpu.eager.plan import Call
from torch_tpu.hlo import module
from torch_tpu.metrics import programs
from torch_tpu.ops.trace import Tracer
from torch_tpu.runtime.client import client


class GraphProgram:
    """What runs a graph. Sizes among its arguments are part of the program, so each combination has its own.

    A graph with something that no program can express (a size that depends on data, another library's operator) runs
    operator by operator.

    Args:
        title: its name in reports.
    """

    kind = "graph"

    def __init__(self, graph: GraphModule, title: str) -> None:
        self.graph = graph
        self.title = title
        self.constants, self.traced = _with_constants_as_inputs(graph)
        self.argument_names = [n.name for n in self.traced.graph.nodes if n.op == "placeholder"]

    def __call__(self, *args: Any) -> Any:
        if hooks.forked is not None:
            hooks.forked()
        sig = execute.CallSignature([self])
        everything = [*self.constants, *args]
        for value in everything:
            sig.argument(int(value) if isinstance(value, torch.SymInt) else value, False)
        key = sig.finish()
        plan = execute.known_plan(key) or execute.find_plan(key, lambda: self._call(sig, everything))
        if isinstance(plan, execute.Unsupported):
            metrics.count("graph_by_operator")
            programs.ran_by_operator(self.title, plan.reason)
            return self.graph(*args)
        return execute.submit(plan, sig)

    def _call(self, sig: execute.CallSignature, args: list[Any]) -> Call:
        taken: dict[str, int] = {}
        return Call(
            self._trace,
            "graph",
            tuple(execute.placeholders(value, sig, False, taken) for value in args),
            {},
            sig.inputs(),
            [],
            [t.dtype for t in sig.hosts],
            execute.computes_wide(sig, args),
            checks_bounds(),
        )

    def _trace(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with tracer:
            return (_NamingInterpreter if client().names_operators else Interpreter)(self.traced).run(*args)


class _NamingInterpreter(Interpreter):
    """Runs a graph under the tracer so that each operation says which operator and line it comes from."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with module.named(f"{_line(n)}/{n.target}"):
            return super().run_node(n)


def _line(node: Node) -> str:
    """`file:line` of the user's code that a node comes from, as Dynamo noted it."""
    found = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else "an unknown place"


def _with_constants_as_inputs(graph: GraphModule) -> tuple[list[torch.Tensor], GraphModule]:
    """The graph's tensor constants, and a copy that takes them as its first inputs and makes tensors on "meta"."""
    copy = torch.fx.Graph()
    constants: list[torch.Tensor] = []
    nodes: dict[Node, Node] = {}
    attributes = [n for n in graph.graph.nodes if n.op == "get_attr"]
    for node in attributes:
        value = operator.attrgetter(node.target)(graph)
        if isinstance(value, torch.Tensor):
            constants.append(value)
            nodes[node] = copy.placeholder(f"constant_{len(constants)}")
    for node in graph.graph.nodes:
        if node not in nodes:
            nodes[node] = copy.node_copy(node, nodes.__getitem__)
            nodes[node].kwargs = {k: _on_meta(v) for k, v in nodes[node].kwargs.items()}
            nodes[node].args = tuple(_on_meta(a) for a in nodes[node].args)
    return constants, GraphModule(graph, copy)


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "tpu" else value
