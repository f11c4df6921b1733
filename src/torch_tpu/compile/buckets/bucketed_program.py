"""A graph with symbolic sizes as programs for buckets of sizes; for sizes of its own where padding is not sound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from torch_tpu import hooks
from torch_tpu.compile.buckets import rules
from torch_tpu.compile.buckets.padded_layout import Layout, Unsound, extent, is_padded, size_of
from torch_tpu.compile.buckets.padded_random import Draw
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.compile.buckets.padded_values import Factors, Padded, lengthened, padded_tensor
from torch_tpu.compile.buckets.policy import Policy
from torch_tpu.compile.buckets.symbolic_sizes import Number, Sizes, Symbols, evaluated
from torch_tpu.compile.program import graph_program as exact
from torch_tpu.eager.dispatch.launch import launch
from torch_tpu.eager.dispatch.operator import checks_bounds
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.call_signature import CallSignature, Changed, computes_wide, placeholders
from torch_tpu.eager.program.plan import Call, Plan
from torch_tpu.metrics import programs
from torch_tpu.ops.tracing.tracer import Data, Tracer
from torch_tpu.recent import Recent

Values = dict[sympy.Symbol, int]


class Family:
    """Graphs whose symbols mean the same (forward and backward), and the first value that each symbol had.

    A symbol is padded once it has had two values. PyTorch gives symbols to sizes that never change, too.
    """

    def __init__(self) -> None:
        self._first: Values = {}
        self._varying: set[sympy.Symbol] = set()

    def fixed(self, true: Values) -> Values:
        """The symbols that have had no other value than at this call."""
        for symbol, value in true.items():
            if self._first.setdefault(symbol, value) != value:
                self._varying.add(symbol)
        return {symbol: value for symbol, value in true.items() if symbol not in self._varying}


@dataclass(frozen=True)
class Traced:
    """What tracing found out about a program: its results' layouts, and what random numbers it draws."""

    layouts: tuple[Layout | None, ...]
    draws: tuple[Draw, ...]


class BucketedProgram:
    """What runs a graph with symbolic sizes: a program for each combination of buckets."""

    kind = "graph"

    def __init__(self, graph: GraphModule, title: str, is_backward: bool, policy: Policy, family: Family) -> None:
        self.exact = exact.GraphProgram(graph, title, is_backward)
        self.title = title
        self.graph = graph
        self._policy = policy
        self._family = family
        self._placeholders = graph.graph.find_nodes(op="placeholder")
        self._outputs: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
        self._symbols = Symbols(graph)
        # As long as a plan is known what was traced with it is, because this table forgets later.
        self._traced: Recent[Any, Traced] = Recent(2 * plan_table.MOST_PLANS)
        self._refused = self._refusal()
        self.argument_names = [
            *(f"constant_{i + 1}" for i in range(len(self.exact.constants))),
            *(n.name for n in self._placeholders),
            *(f"true {symbol}" for symbol in self._symbols.order),
        ]

    def _refusal(self) -> str:
        """Why no program can be padded, as far as the graph alone shows it."""
        if self.exact.border.refused:
            return self.exact.border.refused
        if self._symbols.unbound:
            return f"its sizes {', '.join(self._symbols.unbound)} depend on data"
        return ""

    def __call__(self, *args: Any) -> Any:
        if self._symbols.of_sizes:
            true = self._symbols.values(args)
            fixed = self._family.fixed(true)
            if not fixed.keys() >= set(self._symbols.of_sizes):
                padded = None if self._refused else self._padded(true, fixed)
                border = self.exact.border
                returned = None if padded is None else self._run(border.enter(args), true, padded, fixed)
                if returned is not None:
                    return border.leave(returned, args)
                if self._refused:
                    programs.specialised(self.title, self._refused)
        return self.exact(*args)

    def _padded(self, true: Values, fixed: Values) -> Values | None:
        """The buckets of the sizes; None where there is a program for these sizes alone."""
        padded: Values = {}
        for symbol in self._symbols.of_sizes:
            bucket = true[symbol] if symbol in fixed else self._policy.round_up(true[symbol])
            if bucket is None:
                return None
            padded[symbol] = bucket
        return padded if self._symbols.fit(true, padded) else None

    def _run(self, args: Sequence[Any], true: Values, padded: Values, fixed: Values) -> list[Any] | None:
        if hooks.forked is not None:
            hooks.forked()
        fixed = {symbol: value for symbol, value in fixed.items() if symbol in padded}
        family = self._family, tuple(fixed.items())
        given: list[Any] = list(self.exact.constants)
        places: list[Layout | None] = [None] * len(given)
        for node, value in zip(self._placeholders, args, strict=True):
            layout = _padded_layout(node, fixed)
            if layout is not None and value is not None:
                shape = [evaluated(dim[0], padded) for dim in layout]

                def fits(v: Padded, layout: Layout = layout) -> bool:
                    return (
                        v.family == family
                        and all(size_of(dim) == wanted for dim, (wanted,) in zip(v.layout, layout, strict=True))
                        and v.factors == _factors(v.layout, true, padded)
                    )

                value, own = lengthened(value, shape, fits)
                layout = own or layout
            elif isinstance(node.meta.get("val"), (torch.SymInt, int)):
                value = None
            given.append(value)
            places.append(layout)
        sig = CallSignature([self])
        sig.key += [family, *padded.values(), *places]
        for value in given:
            sig.argument(value, False)
        numbers = [true[symbol] for symbol in self._symbols.order]
        for number in numbers:
            sig.argument(number, True)
        key = sig.finish()
        plan = plan_table.known_plan(key, sig)
        if plan is None:
            plan = plan_table.find_plan(key, sig, lambda: self._call(sig, given, numbers, places, padded, fixed, key))
        if not isinstance(plan, Plan):
            self._refused = plan.reason.partition("\n")[0]
            return None
        try:
            computed = launch(plan, sig.values, sig.data, sig)
        except Changed:
            return self._run(args, true, padded, fixed)
        traced = self._traced.find(key)
        assert traced is not None
        if traced.draws:
            # The program knows only how much it draws in terms of true sizes.
            hooks.take_random(None, sum((evaluated(n, true) * words + 3) // 4 * 4 for n, words in traced.draws))
        return self._results(zip(computed, traced.layouts, strict=True), args, true, padded, family)

    def _results(
        self,
        found: Iterator[tuple[Any, Layout | None]],
        args: Sequence[Any],
        true: Values,
        padded: Values,
        family: Any,
    ) -> list[Any]:
        results: list[Any] = []
        made: dict[Node, Any] = {}
        for node in self._outputs:
            if not isinstance(node, Node):
                results.append(node)
                continue
            if node.op == "placeholder":
                made[node] = args[self._placeholders.index(node)]
            elif _is_number(node):
                made[node] = evaluated(node.meta["val"].node.expr, true)
            elif node not in made:
                value, layout = next(found)
                if layout is not None and any(map(is_padded, layout)):
                    factors = _factors(layout, true, padded)
                    strides = [_size(s, true) for s in node.meta["val"].stride()]
                    value = padded_tensor(value, layout, factors, family, strides)
                made[node] = value
            results.append(made[node])
        return results

    # --- tracing -------------------------------------------------------------------------------------------------

    def _call(
        self,
        sig: CallSignature,
        given: list[Any],
        numbers: list[int],
        places: list[Any],
        padded: Values,
        fixed: Values,
        key: Any,
    ) -> Call:
        taken: dict[str, int] = {}
        arguments = [placeholders(value, sig, False, taken) for value in given]
        arguments += [placeholders(number, sig, True, taken) for number in numbers]

        def trace(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            results, traced = self._trace(tracer, args, places, padded, fixed)
            self._traced.keep(key, traced)
            return results

        return Call(
            trace,
            "graph",
            tuple(arguments),
            {},
            sig.inputs(),
            sig.data,
            [t.dtype for t in sig.hosts],
            computes_wide(sig, given),
            checks_bounds(),
            guarded=True,
        )

    def _trace(
        self, tracer: Tracer, args: Sequence[Any], places: Sequence[Any], padded: Values, fixed: Values
    ) -> tuple[list[Any], Traced]:
        constants, count = len(self.exact.constants), len(args) - len(self._symbols.order)
        tracer.constants = {id(t): own for t, own in zip(self.exact.literals, args, strict=False)}
        true = {s: data.array for s, data in zip(self._symbols.order, args[count:], strict=True)}
        inputs = []
        for node, value, layout in zip(self._placeholders, args[constants:count], places[constants:], strict=True):
            size = node.meta.get("val")
            if isinstance(size, torch.SymInt):
                value = Number(size.node.expr)
            elif isinstance(size, int):
                value = size
            elif layout is not None:
                value.places = layout
            inputs.append(value)
        interpreter = PaddedTracer(tracer, self.graph, Sizes(padded, true, fixed), rules.find)
        returned = iter(interpreter.run(*inputs))
        results: list[Any] = []
        found: list[Layout | None] = []
        seen = set()
        for node, value in zip(self._outputs, returned, strict=True):
            if not isinstance(node, Node) or node.op == "placeholder" or _is_number(node) or node in seen:
                continue
            seen.add(node)
            if isinstance(value, Data):
                raise Unsound("the graph returns a Python number that the program computes")
            results.append(value)
            found.append(layout_of(value) if isinstance(value, torch.Tensor) else None)
        return results, Traced(tuple(found), tuple(interpreter.draws))


def _padded_layout(node: Node, fixed: Values) -> Layout | None:
    """The layout of an argument with symbolic sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    layout = tuple((extent(size, fixed),) for size in value.shape)
    return layout if any(map(is_padded, layout)) else None


def _factors(layout: Layout, true: Values, padded: Values) -> Factors:
    return tuple(tuple((evaluated(f, true), evaluated(f, padded)) for f in dim) for dim in layout)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


def _size(size: Any, true: Values) -> int:
    return int(evaluated(size.node.expr, true)) if isinstance(size, torch.SymInt) else int(size)
