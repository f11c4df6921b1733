"""FX graphs under a tracer: a graph is run node by node, the graphs inside of it become functions of the program."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves, tree_map

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, strided
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.registry import NoLowering
from torch_tpu.ops.tracing import program_scalars
from torch_tpu.ops.tracing.tracer import Data, Tracer, Unknown


class GraphTracer(Interpreter):
    """Runs a graph on meta tensors; `tracer` appends each node to the program. `at` is the node it is at."""

    def __init__(self, tracer: Tracer, graph: GraphModule) -> None:
        super().__init__(graph)
        self.tracer = tracer
        self.at: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.at = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.tracer.constants.get(id(value), value)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        if isinstance(target, HigherOrderOperator):
            return self.tracer.call(target, args, kwargs)
        if target is torch.ops.aten._local_scalar_dense.default:
            return Unknown(hlo.reshape(self.tracer.read(args[0]), ()))
        if target is not operator.getitem and any(isinstance(v, Unknown) for v in tree_leaves((args, kwargs))):
            return program_scalars.call(self.tracer, target, args, kwargs)
        with self.tracer:
            return super().call_function(target, args, kwargs)


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


def constants(graph: GraphModule) -> list[torch.Tensor]:
    """The tensors that are part of a graph and of the graphs inside of it, each once."""
    found: dict[int, torch.Tensor] = {}
    for part in graph.modules():
        if isinstance(part, GraphModule):
            found.update((id(value), value) for value in _constants_of(part))
    return list(found.values())


def _constants_of(graph: GraphModule) -> Iterator[torch.Tensor]:
    for node in graph.graph.find_nodes(op="get_attr"):
        value: Any = graph
        for name in node.target.split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor):
            yield value


@dataclass(frozen=True)
class Output:
    """What a subgraph returns at one place: a tensor, a number (no strides), or the same `value` at every run."""

    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    value: Any = None

    @property
    def is_static(self) -> bool:
        return self.dtype is None

    def attach(self, tracer: Tracer, array: Array) -> torch.Tensor | Unknown:
        """The tensor or number whose elements are `array`, for the graph outside."""
        if self.strides is None:
            return Unknown(array)
        return tensor(tracer, array, self.strides)


@dataclass(frozen=True)
class Subgraph:
    """A graph as a private function of the program.

    Its results are the outputs that aren't static, then each check's condition and the value for its message.

    Attributes:
        graph: kept alive, because its address names it.
        captured: the constants it takes after its inputs; then it takes the random state.
        checks: message, error and whether there is a value, of each check.
        draws: by how many random words it advances the generator.
    """

    graph: GraphModule
    function: module.Function
    captured: tuple[int, ...]
    outputs: tuple[Output, ...]
    checks: tuple[tuple[str, type[Exception], bool], ...]
    draws: int

    def captures(self, tracer: Tracer) -> list[Array]:
        """The values of its constants, where `tracer` builds."""
        return [tracer.read(tracer.constants[i]) for i in self.captured]

    def call(self, inputs: Sequence[Array], captures: Sequence[Array], state: Array | None) -> list[Array]:
        """Its results; `state` is what `Rng` starts from, if it draws."""
        return module.invoke(self.function, [*inputs, *captures, state])  # type: ignore[list-item]

    def results(self, tracer: Tracer, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """What it returns, made of its dynamic outputs' arrays."""
        given = iter(arrays)
        return tuple(o.value if o.is_static else o.attach(tracer, next(given)) for o in self.outputs)

    @property
    def dynamic(self) -> int:
        """How many outputs are not static."""
        return sum(not o.is_static for o in self.outputs)


def inputs(tracer: Tracer, args: Sequence[Any]) -> list[Array]:
    """The arrays of those arguments that are tensors or numbers of the program, in their order."""
    return [tracer.read(a) if isinstance(a, torch.Tensor) else a.array for a in args if _is_dynamic(a)]


def _is_dynamic(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Data))


def trace(tracer: Tracer, graph: GraphModule, args: Sequence[Any]) -> Subgraph:
    """The function of a graph for arguments like these; one that was traced before is used again."""
    if not isinstance(graph, GraphModule):
        raise NoLowering(f"a higher-order operator of {graph}")
    key = (id(graph), *(_description(a) for a in args))
    found: Subgraph | None = tracer.subgraphs.get(key)
    if found is None:
        found = tracer.subgraphs[key] = _trace(tracer, graph, args)
    return found


def _description(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, Data):
        return value.array.dtype
    return type(value), repr(value)


def _trace(tracer: Tracer, graph: GraphModule, args: Sequence[Any]) -> Subgraph:
    captured = [id(t) for t in constants(graph)]
    taken = [*(a for a in args if _is_dynamic(a)), *(tracer.constants[i] for i in captured)]
    parameters = [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else ((), t.array.dtype) for t in taken]
    drawn: list[Rng] = []
    made: dict[str, Any] = {}

    def body(*arrays: Array) -> list[Array]:
        def rng() -> Rng:
            if not drawn:
                drawn.append(Rng(arrays[-1]))
            return drawn[0]

        inner = Tracer(rng=rng, checks=tracer.with_checks)
        inner.subgraphs = tracer.subgraphs
        given: list[Any] = [
            tensor(inner, array, t.stride()) if isinstance(t, torch.Tensor) else Unknown(array)
            for t, array in zip(taken, arrays, strict=False)
        ]
        inner.constants = dict(zip(captured, given[len(given) - len(captured) :], strict=True))
        operands = iter(given)
        returned = GraphTracer(inner, graph).run(*(next(operands) if _is_dynamic(a) else a for a in args))
        made["outputs"], results = _outputs(inner, returned)
        made["checks"] = [(message, error, value is not None) for _, message, error, value in inner.checks]
        for condition, _, _, value in inner.checks:
            results.extend([condition] if value is None else [condition, value])
        return results

    function = module.define([*parameters, ((2,), torch.uint64)], body)
    draws = drawn[0].drawn if drawn else 0
    return Subgraph(graph, function, tuple(captured), tuple(made["outputs"]), tuple(made["checks"]), draws)


def _outputs(tracer: Tracer, returned: Any) -> tuple[list[Output], list[Array]]:
    outputs, arrays = [], []
    for value in tree_leaves(returned):
        if isinstance(value, torch.Tensor):
            arrays.append(tracer.read(value))
            outputs.append(Output(tuple(value.shape), value.stride(), value.dtype))
        elif isinstance(value, Data):
            arrays.append(value.array)
            outputs.append(Output(dtype=value.array.dtype))
        else:
            outputs.append(Output(value=value))
    return outputs, arrays


def tensor(tracer: Tracer, array: Array, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A meta tensor of these elements; contiguous unless strides are given.

    Of strides that are not dense the order of the dimensions is kept: a view that was possible stays so.
    """
    if strides is None:
        strides = strided.contiguous_strides(array.shape)
    elif not strided.is_dense(array.shape, strides):
        strides = torch.empty_like(torch.empty_strided(array.shape, strides, device="meta")).stride()
    return tracer.fresh(torch.empty_strided(array.shape, strides, dtype=array.dtype, device="meta"), array)
