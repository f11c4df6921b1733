"""A graph of ATen operators as a program: traced like one operator, found again by the shapes of its arguments."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from torch_tpu import hooks, metrics
from torch_tpu.compile.program import stored_graph
from torch_tpu.compile.program.call_cache import Recall
from torch_tpu.compile.program.graph_cut import Cut, is_worth_it
from torch_tpu.compile.program.host_io import Border
from torch_tpu.compile.program.node_value import node_value
from torch_tpu.eager.dispatch.launch import launch
from torch_tpu.eager.dispatch.operator import checks_bounds
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.call_signature import CallSignature, Changed, computes_wide, placeholders
from torch_tpu.eager.program.plan import Call, Plan
from torch_tpu.hlo import module
from torch_tpu.metrics import programs
from torch_tpu.ops.core import derived
from torch_tpu.ops.core.schema import bind, signature
from torch_tpu.ops.tracing import uninitialised
from torch_tpu.ops.tracing.subgraph import GraphTracer, constants, tensor
from torch_tpu.ops.tracing.tracer import Data, Tracer, Unknown
from torch_tpu.recent import Recent
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import value_of


@dataclass(frozen=True)
class Facts:
    """What a call needs to know of a graph before it is traced.

    Attributes:
        inputs: names of its placeholders.
        constants: how many tensors are part of it.
        numbers: places of the inputs that are numbers and nothing but data, so that programs take them as they are.
        groups: the names of the groups of processes it communicates in.
    """

    border: Border
    inputs: tuple[str, ...]
    has_fixed_shapes: bool
    constants: int
    numbers: frozenset[int]
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A graph for a later process, which reads it when it has to trace it."""

    code: bytes
    facts: Facts


def facts_of(graph: GraphModule) -> Facts:
    placeholders = graph.graph.find_nodes(op="placeholder")
    return Facts(
        Border(graph),
        tuple(n.name for n in placeholders),
        not any(node_value(n).is_dynamic for n in placeholders),
        len(constants(graph)),
        frozenset(
            i
            for i, n in enumerate(placeholders)
            if _is_number(n) and n.users and all(map(partial(_is_data, n), n.users))
        ),
        tuple(sorted({name for m in graph.modules() if isinstance(m, GraphModule) for name in _groups(m)})),
    )


def _groups(graph: GraphModule) -> Iterator[str]:
    """The groups in which a graph communicates."""
    for node in graph.graph.nodes:
        func = node.target
        if isinstance(func, OpOverload) and func.namespace == "_c10d_functional":
            given = zip(signature(func).arguments, bind(func, node.args, node.kwargs), strict=True)
            yield from (value for a, value in given if a.name == "group_name" and isinstance(value, str))


def _is_number(node: Node) -> bool:
    return node_value(node).is_dynamic and not node_value(node).device


def _is_data(number: Node, user: Node) -> bool:
    """Whether a node takes a number as an operand, and has a lowering whose program does not depend on it."""
    func = user.target
    if user.op != "call_function" or not isinstance(func, OpOverload):
        return False
    given = zip(signature(func).arguments, bind(func, user.args, user.kwargs), strict=True)
    taken = [(a, value) for a, value in given if number in tree_leaves(value)]
    return all(value is number and derived.is_data(func, a) is True for a, value in taken)


def _resident(constant: torch.Tensor) -> torch.Tensor:
    """A constant of a graph on the device; numbers (0-d tensors) may stay on the host."""
    if constant.device.type == "cpu":
        return constant.to("tpu") if constant.dim() else constant
    # A deep copy has bytes in its storage, by which its program would differ from that of a later process.
    is_bytes = value_of(constant.untyped_storage()).geometry.dtype is not constant.dtype
    return constant.cpu().to("tpu") if is_bytes else constant


class GraphProgram:
    """What runs a graph. Sizes among its arguments are part of the program, so each combination has its own.

    A graph with something that no program can express (a size that depends on data, another library's operator) is cut
    around it. What is left of that, and what the host alone can do, runs operator by operator.

    Args:
        title: its name in reports.
        is_backward: its arguments don't come from Dynamo, which compares strides.
        identity: what it is called in every process, if not by its bytes.
    """

    kind = "graph"

    def __init__(
        self, graph: GraphModule | Stored, title: str, is_backward: bool = False, identity: str | None = None
    ) -> None:
        self._given_identity = identity
        self._graph: GraphModule | None = graph if isinstance(graph, GraphModule) else None
        self._stored: Stored | None = graph if isinstance(graph, Stored) else None
        self.title = title
        self._facts = facts_of(graph) if isinstance(graph, GraphModule) else graph.facts
        self.border = self._facts.border
        self.literals = constants(self.graph) if self._facts.constants else []
        with unset_fake_temporarily():
            self.constants = [_resident(t) for t in self.literals]
        self._is_backward = is_backward
        self._recall: Recall | None = None
        # The ranks of its groups at the last call: a name may be given to other ranks in another world.
        self._known_members: tuple[str, ...] = ()
        # Where tracing failed, of each signature that no program can express; forgotten later than what is known of it.
        self._stuck: Recent[Any, tuple[Node | None]] = Recent(2 * plan_table.MOST_PLANS)
        self._cuts: dict[Node, Cut] = {}
        self._at: Node | None = None
        self.argument_names = [f"constant_{i + 1}" for i in range(len(self.constants))] + list(self._facts.inputs)

    @property
    def graph(self) -> GraphModule:
        if self._graph is None:
            assert self._stored is not None
            self._graph = stored_graph.load(self._stored.code)
            self.literals = constants(self._graph)
        return self._graph

    def stored(self) -> Stored:
        """The graph for a later process.

        Raises:
            Unstorable: where that might not get the same one back.
        """
        if self._stored is None:
            self._stored = Stored(stored_graph.dump(self.graph), self._facts)
        return self._stored

    @functools.cached_property
    def _identity(self) -> str:
        """What the graph is called in every process; empty if it can't be stored."""
        if self._given_identity is not None:
            return self._given_identity
        try:
            return hashlib.sha256(self.stored().code).hexdigest()
        except stored_graph.UnstorableGraph:
            return ""

    def _identity_here(self) -> str:
        """The same with the ranks that its groups have now: their names are used again in other worlds."""
        if not self._identity or not self._facts.groups:
            return self._identity
        return f"{self._identity} {self._members()}"

    def _members(self) -> tuple[str, ...]:
        """The ranks of its groups now."""
        from torch_tpu.ops.collectives import group_of

        return tuple(f"{name}: {group_of(name)}" for name in self._facts.groups)

    def __call__(self, *args: Any) -> Any:
        if hooks.forked is not None:
            hooks.forked()
        if not self._facts.has_fixed_shapes and any(map(_is_nested, args)):
            return self._of_nested(args)
        if self.border.refused:
            return self._by_operator(self.border.refused, args)
        everything = [*self.constants, *(self.border.enter(args) if self.border else args)]
        members = self._members() if self._facts.groups else ()
        if members != self._known_members:
            self._recall, self._known_members = None, members
        if self._recall is not None:
            known = self._recall.signature(everything)
            if known is not None:
                return self._run(self._recall.plan, known, args)
        sig = CallSignature([self, uninitialised.is_filled(), *members])
        first = len(self.constants)
        for i, value in enumerate(everything):
            sig.argument(int(value) if isinstance(value, torch.SymInt) else value, i - first in self._facts.numbers)
        key = sig.finish()
        plan = plan_table.known_plan(key, sig)
        if plan is None:
            plan = plan_table.find_plan(key, sig, lambda: self._call(sig, everything))
            if hooks.graph_program_made is not None:
                hooks.graph_program_made(self, plan)
        if isinstance(plan, plan_table.Unsupported):
            (at,) = self._stuck.find(key) or self._stuck.keep(key, (self._at,))
            return self._around(at, plan.reason, args)
        if self._facts.has_fixed_shapes and len(sig.tensors) == len(everything):
            self._recall = Recall(plan, sig, not self._is_backward)
        return self._run(plan, sig, args)

    def _run(self, plan: Plan, sig: CallSignature, args: tuple[Any, ...]) -> Any:
        try:
            returned, numbers = launch(plan, sig.values, sig.data, sig)
        except Changed:
            self._recall = None
            return self(*args)
        for i in numbers:
            returned[i] = returned[i].item()
        return self.border.leave(returned, args) if self.border else returned

    def _of_nested(self, args: tuple[Any, ...]) -> Any:
        """A call with sizes of jagged dimensions. Each stands for several lengths: a program has no use for it."""
        nodes = self.graph.graph.find_nodes(op="placeholder")
        nested = {node: value for node, value in zip(nodes, args, strict=True) if _is_nested(value)}
        if any(user.op != "output" for node in nested for user in node.users):
            return self._by_operator("it computes with the length of a jagged dimension", args)
        returned = self(*(0 if _is_nested(value) else value for value in args))
        leaving = self.graph.graph.output_node().args[0]
        return [nested.get(node, r) for node, r in zip(leaving, returned, strict=True)]  # type: ignore[arg-type]

    def _around(self, node: Node | None, reason: str, args: tuple[Any, ...]) -> Any:
        """Runs the graph around a node that no program can express; operator by operator where that is all of it."""
        if node is None or not is_worth_it(self.graph, node):
            return self._by_operator(reason, args)
        metrics.count("graph_cut")
        programs.ran_in_pieces(self.title, reason.partition("\n")[0])
        if node not in self._cuts:
            self._cuts[node] = Cut(
                self.graph,
                node,
                lambda piece, is_first: GraphProgram(
                    piece, f"{self.title}, {'before' if is_first else 'after'} {node}", True
                ),
            )
        return self._cuts[node](*args)

    def _by_operator(self, reason: str, args: tuple[Any, ...]) -> Any:
        metrics.count("graph_by_operator")
        programs.ran_by_operator(self.title, reason.partition("\n")[0])
        return self.graph(*args)

    def _call(self, sig: CallSignature, args: list[Any]) -> Call:
        taken: dict[str, int] = {}
        return Call(
            self._trace,
            "graph",
            tuple(
                placeholders(value, sig, i - len(self.constants) in self._facts.numbers, taken)
                for i, value in enumerate(args)
            ),
            {},
            sig.inputs(),
            sig.data,
            [t.dtype for t in sig.hosts],
            computes_wide(sig, args),
            checks_bounds(),
            guarded=True,
            identity=self._identity_here() if client().disk_cache is not None else "",
        )

    def _trace(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """What the graph returns, and where that is a number which the program computes."""
        taken = len(self.constants)
        tracer.constants = {id(t): given for t, given in zip(self.literals, args, strict=False)}
        interpreter = (_NamingTracer if client().names_operators else GraphTracer)(tracer, self.graph)
        self._at = None
        try:
            # As numbers that the program computes: their values don't count.
            given = (Unknown(a.array) if isinstance(a, Data) else a for a in args[taken:])
            returned = list(interpreter.run(*given))
        except NotImplementedError:
            self._at = interpreter.at
            raise
        storages = Counter(t.untyped_storage()._cdata for t in (*args, *returned) if isinstance(t, torch.Tensor))
        for i, value in enumerate(returned):
            if not isinstance(value, torch.Tensor) or any(value is a for a in args):
                continue
            # The bit of a conjugated tensor is lost with the meta tensor. A view that is nobody else's becomes a value
            # of its own: a program that is given it need not be another than for one that never was a view.
            has_bit = value.is_conj() or value.is_neg()
            if has_bit or (_is_whole(value) and storages[value.untyped_storage()._cdata] == 1):
                returned[i] = tensor(tracer, tracer.read(value), value.stride())
        numbers = [i for i, value in enumerate(returned) if isinstance(value, Data)]
        for i in numbers:
            returned[i] = tensor(tracer, returned[i].array)
        return returned, numbers


def _is_nested(value: Any) -> bool:
    """Whether a size is that of a jagged dimension."""
    return isinstance(value, torch.SymInt) and bool(value.node.is_nested_int())


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a tensor is all that its storage holds, in row-major order."""
    return value.numel() * value.itemsize == value.untyped_storage().nbytes() and value.is_contiguous()


class _NamingTracer(GraphTracer):
    """Traces a graph so that each operation says which operator and line it comes from."""

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with module.named(f"{_line(n)}/{n.target}"):
            return super().run_node(n)


def _line(node: Node) -> str:
    """`file:line` of the user's code that a node comes from, as Dynamo noted it."""
    found = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else "an unknown place"
