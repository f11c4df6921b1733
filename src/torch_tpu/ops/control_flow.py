"""`cond`, `while_loop`, `scan`, `map` and subgraphs that are called several times.

Each graph inside becomes a private function (`ops.tracing.subgraph`), which the regions of a StableHLO `if` or `while`
call. Conditions that such a function states (an index in bounds) leave it as results, and a loop as the first that
failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import NoLowering, lower_higher_order
from torch_tpu.ops.tracing import subgraph
from torch_tpu.ops.tracing.subgraph import GraphTracer, Output, Subgraph, tensor
from torch_tpu.ops.tracing.tracer import Data, Tracer, Unknown
from torch_tpu.ops.tracing.trip_count import trip_count

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


# --- called as it is ---------------------------------------------------------------------------------------------


@lower_higher_order("invoke_subgraph")
def invoke_subgraph(tracer: Tracer, graph: GraphModule, identifier: str, *operands: Any) -> tuple[Any, ...]:
    """One function, however often the graph is called."""
    callee = subgraph.trace(tracer, graph, operands)
    arrays = callee.call(subgraph.inputs(tracer, operands), callee.captures(tracer), _random_state(tracer, [callee]))
    _state_checks(tracer, [callee], arrays[callee.dynamic :])
    return callee.results(tracer, arrays)


@lower_higher_order("wrap", "strict_mode", "wrap_with_set_grad_enabled", "wrap_with_autocast", "hints_wrapper")
def inline(tracer: Tracer, *args: Any, **kwargs: Any) -> Any:
    """Graphs that say something about autograd or optimisation, which has been dealt with when they get here."""
    place = next(i for i, a in enumerate(args) if isinstance(a, GraphModule))
    operands = args[place + 1 :]
    if len(operands) == 2 and isinstance(operands[0], (tuple, list)) and isinstance(operands[1], dict):
        operands = tuple(operands[0])
    return GraphTracer(tracer, args[place]).run(*operands)


def _random_state(tracer: Tracer, callees: Sequence[Subgraph], runs: int = 1) -> Array | None:
    """The state from which functions, one of which runs so often, draw the words that the program then passes over.

    None if none reads it; one that saves it for a checkpoint may draw nothing.
    """
    draws = callees[0].draws
    if not draws and not any(callee.function.used[-1] for callee in callees):
        return None
    state = tracer.rng().position()
    tracer.rng().skip(draws * runs)
    return state


# --- cond --------------------------------------------------------------------------------------------------------


@lower_higher_order("cond")
def cond(
    tracer: Tracer, predicate: Any, when_true: GraphModule, when_false: GraphModule, operands: Sequence[Any]
) -> tuple[Any, ...]:
    if isinstance(predicate, (bool, int)):
        return invoke_subgraph(tracer, when_true if predicate else when_false, "", *operands)
    branches = [subgraph.trace(tracer, graph, operands) for graph in (when_true, when_false)]
    draws = branches[0].draws
    if draws != branches[1].draws:
        raise NoLowering("cond whose branches draw different amounts of random numbers")
    outputs = [_common(a, b) for a, b in zip(branches[0].outputs, branches[1].outputs, strict=True)]
    inputs, state = subgraph.inputs(tracer, operands), _random_state(tracer, branches)
    captures = [branch.captures(tracer) for branch in branches]

    def run(taken: int) -> list[Array]:
        branch = branches[taken]
        arrays = branch.call(inputs, captures[taken], state)
        values = iter(arrays[: branch.dynamic])
        results = []
        for own, common in zip(branch.outputs, outputs, strict=True):
            if not common.is_static:
                assert common.dtype is not None
                results.append(hlo.as_array(own.value if own.is_static else next(values), common.dtype))
        for i, other in enumerate(branches):
            results.extend(arrays[branch.dynamic :] if i == taken else _holding(other))
        return results

    specs = [(o.shape, o.dtype) for o in outputs if o.dtype is not None]
    specs += [((), a.dtype) for branch in branches for a in _holding(branch)]
    predicate = predicate.array if isinstance(predicate, Data) else hlo.reshape(tracer.read(predicate), ())
    arrays = structured.conditional(hlo.convert(predicate, torch.bool), lambda: run(0), lambda: run(1), specs)
    dynamic = sum(not o.is_static for o in outputs)
    _state_checks(tracer, branches, arrays[dynamic:])
    given = iter(arrays)
    return tuple(o.value if o.is_static else o.attach(tracer, next(given)) for o in outputs)


def _common(a: Output, b: Output) -> Output:
    """What two branches return at the same place."""
    if a.is_static and b.is_static:
        if type(a.value) is type(b.value) and a.value == b.value:
            return a
        if type(a.value) in _NUMBERS and type(b.value) in _NUMBERS:
            return Output(dtype=_NUMBERS[type(a.value)])
    elif (a.shape, a.dtype) == (b.shape, b.dtype):
        return a
    elif a.strides is None and b.strides is None and a.value is None and b.value is None:
        return a if b.is_static else b
    raise NoLowering(f"cond whose branches return {a} and {b}")


# --- loops -------------------------------------------------------------------------------------------------------


class _Carried:
    """What a loop carries from step to step: tensors, and numbers, which its graphs get as unknown ones."""

    def __init__(self, tracer: Tracer, values: Sequence[Any]) -> None:
        self.arrays: list[Array] = []
        self.outputs: list[Output] = []
        self.arguments: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                self.arrays.append(tracer.read(value))
                self.outputs.append(Output(tuple(value.shape), value.stride(), value.dtype))
                self.arguments.append(value)
            else:
                number = value.array if isinstance(value, Data) else hlo.constant(value, _NUMBERS[type(value)])
                self.arrays.append(number)
                self.outputs.append(Output(dtype=number.dtype))
                self.arguments.append(Unknown(number))

    def after(self, outputs: Sequence[Output], arrays: Sequence[Array]) -> list[Array]:
        """The next step's values, from what a graph returned."""
        given = iter(arrays)
        result = []
        for before, out in zip(self.outputs, outputs, strict=True):
            assert before.dtype is not None
            array = hlo.constant(out.value, before.dtype) if out.is_static else next(given)
            is_number = before.strides is None
            if array.shape != before.shape or (array.dtype is not before.dtype and not is_number):
                raise NoLowering(f"a loop that carries {before} and returns {out}")
            result.append(hlo.convert(array, before.dtype))
        return result

    def results(self, tracer: Tracer, arrays: Sequence[Array]) -> list[Any]:
        return [o.attach(tracer, a) for o, a in zip(self.outputs, arrays, strict=True)]


@lower_higher_order("while_loop")
def while_loop(
    tracer: Tracer,
    condition: GraphModule,
    body: GraphModule,
    carried: Sequence[Any],
    additional: Sequence[Any],
    mutated_arg_indices: str = "",
) -> tuple[Any, ...]:
    if mutated_arg_indices:
        raise NoLowering("while_loop that writes what it does not carry")
    carry = _Carried(tracer, carried)
    operands = [*carry.arguments, *additional]
    test, step = (subgraph.trace(tracer, graph, operands) for graph in (condition, body))
    if test.draws or step.draws:
        raise NoLowering("while_loop that draws random numbers: how many is known only afterwards")
    if test.checks:
        raise NoLowering("while_loop whose condition checks indices")
    extra = subgraph.inputs(tracer, additional)
    captures = [callee.captures(tracer) for callee in (test, step)]
    count = len(carry.arrays)

    def holds(*arrays: Array) -> Array:
        results = test.call([*arrays[:count], *extra], captures[0], None)
        if test.outputs[0].is_static:
            return hlo.constant(bool(test.outputs[0].value), torch.bool)
        return hlo.reshape(hlo.convert(results[0], torch.bool), ())

    def next_step(*arrays: Array) -> list[Array]:
        results = step.call([*arrays[:count], *extra], captures[1], None)
        return [
            *carry.after(step.outputs, results[: step.dynamic]),
            *_first_failure(step, arrays[count:], results[step.dynamic :]),
        ]

    arrays = structured.while_loop([*carry.arrays, *_holding(step)], holds, next_step)
    _state_checks(tracer, [step], arrays[count:])
    return tuple(carry.results(tracer, arrays[:count]))


@lower_higher_order("while_loop_stack_output")
def while_loop_stack_output(
    tracer: Tracer, condition: GraphModule, body: GraphModule, carried: Sequence[Any], additional: Sequence[Any]
) -> tuple[Any, ...]:
    """What the loop carries after each step, which its gradient needs; before it, if there is no step."""
    count = trip_count(tracer, condition, body, carried, additional)
    if count is None:
        raise NoLowering("the gradient of a while_loop whose number of steps depends on data")
    carry = _Carried(tracer, carried)
    if not count:
        return tuple(tensor(tracer, hlo.expand_dims(a, 0)) for a in carry.arrays)
    return _stacking_loop(tracer, body, carry, [], additional, count, stacks_carry=True)


@lower_higher_order("scan")
def scan(
    tracer: Tracer, combine: GraphModule, init: Sequence[Any], xs: Sequence[torch.Tensor], additional: Sequence[Any]
) -> tuple[Any, ...]:
    """A loop over the first dimension of `xs`; its other results are stacked."""
    if not xs:
        return tuple(init)
    return _stacking_loop(tracer, combine, _Carried(tracer, init), xs, additional, xs[0].shape[0])


@lower_higher_order("map_impl")
def map_(tracer: Tracer, graph: GraphModule, xs: Sequence[torch.Tensor], operands: Sequence[Any]) -> tuple[Any, ...]:
    return _stacking_loop(tracer, graph, _Carried(tracer, []), xs, operands, xs[0].shape[0])


def _stacking_loop(
    tracer: Tracer,
    graph: GraphModule,
    carry: _Carried,
    xs: Sequence[torch.Tensor],
    additional: Sequence[Any],
    length: int,
    *,
    stacks_carry: bool = False,
) -> tuple[Any, ...]:
    """Calls a graph with what is carried and a row of each of `xs`, and stacks what it returns besides the carry.

    Args:
        stacks_carry: returns the carried values after each step, instead of those after the last.
    """
    rows = [_row(tracer, x) for x in xs]
    step = subgraph.trace(tracer, graph, [*carry.arguments, *rows, *additional])
    given, extra, captures = [tracer.read(x) for x in xs], subgraph.inputs(tracer, additional), step.captures(tracer)
    state = _random_state(tracer, [step], length)
    own, others = step.outputs[: len(carry.outputs)], step.outputs[len(carry.outputs) :]
    own_dynamic = sum(not o.is_static for o in own)
    stacked = carry.outputs if stacks_carry else [o for o in others if not o.is_static]
    buffers = [hlo.zeros((length, *o.shape), o.dtype) for o in stacked if o.dtype is not None]
    count, carried = len(carry.arrays), len(carry.arrays) + len(buffers)
    zero = hlo.constant(0, torch.int32)

    def body(i: Array, *arrays: Array) -> list[Array]:
        starts = lambda ndim: [i, *[zero] * (ndim - 1)]  # noqa: E731
        slices = [hlo.reshape(hlo.dynamic_slice(x, starts(x.ndim), (1, *x.shape[1:])), x.shape[1:]) for x in given]
        results = step.call([*arrays[:count], *slices, *extra], captures, _after(state, i, step.draws))
        after = carry.after(own, results[:own_dynamic])
        rows = after if stacks_carry else results[own_dynamic : step.dynamic]
        written = [
            hlo.dynamic_update_slice(buffer, hlo.expand_dims(row, 0), starts(buffer.ndim))
            for buffer, row in zip(arrays[count:carried], rows, strict=True)
        ]
        return [*after, *written, *_first_failure(step, arrays[carried:], results[step.dynamic :])]

    arrays = structured.fori_loop(length, body, [*carry.arrays, *buffers, *_holding(step)])
    _state_checks(tracer, [step], arrays[carried:])
    values = iter([tensor(tracer, a) for a in arrays[count:carried]])
    if stacks_carry:
        return tuple(values)
    return (*carry.results(tracer, arrays[:count]), *(o.value if o.is_static else next(values) for o in others))


def _row(tracer: Tracer, x: torch.Tensor) -> torch.Tensor:
    """Stands for one step's slice while the graph is traced."""
    with tracer:
        return torch.empty_strided(x.shape[1:], x.stride()[1:], dtype=x.dtype, device="meta")


def _after(state: Array | None, step: Array, draws: int) -> Array | None:
    """The random state after so many steps, which draw `draws` words each."""
    if state is None:
        return None
    passed = hlo.convert(step, torch.uint64) * (draws // 4)
    return state + hlo.stack([hlo.constant(0, torch.uint64), passed], 0)


# --- conditions --------------------------------------------------------------------------------------------------


def _holding(callee: Subgraph) -> list[Array]:
    """What a function's checks return as long as nothing failed."""
    arrays = []
    for _, _, has_value in callee.checks:
        arrays.append(hlo.constant(True, torch.bool))
        if has_value:
            arrays.append(hlo.constant(0, torch.int64))
    return arrays


def _first_failure(callee: Subgraph, before: Sequence[Array], now: Sequence[Array]) -> list[Array]:
    """The checks of a loop's steps so far: whether all held, and the value of the first that did not."""
    result, i = [], 0
    for _, _, has_value in callee.checks:
        result.append(before[i] & now[i])
        if has_value:
            result.append(hlo.select(before[i], hlo.convert(now[i + 1], torch.int64), before[i + 1]))
            i += 1
        i += 1
    return result


def _state_checks(tracer: Tracer, callees: Sequence[Subgraph], arrays: Sequence[Array]) -> None:
    given = iter(arrays)
    for callee in callees:
        for message, error, has_value in callee.checks:
            condition = next(given)
            tracer.check(condition, message, error, next(given) if has_value else None)
