"""Programs of fused eager: a run of recorded operators as one StableHLO module, or as several where it falls apart.

A chunk is described by *code*: for each operator its plan's number, then for each of its values either the number of
an external buffer, by first use, or ~n for slot n, counted from the chunk's first result. Equal codes with equal
outputs are the same program, whatever tensors they run on. Operators that have nothing but externals in common (the
steps of an optimizer for different parameters) are separate parts; parts with equal code share one executable, so
that a hundred equal parameters compile once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_tpu import metrics
from torch_tpu.eager.plan import Plan
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, types
from torch_tpu.hlo.array import Array
from torch_tpu.metrics import programs
from torch_tpu.metrics.places import Place, where
from torch_tpu.runtime.client import Buffer, Executable, client
from torch_tpu.runtime.cpu_options import options_for

# For each number parameter of a plan the numbers given for it; None for a plan without such parameters.
Numbers = Sequence[Sequence[Any]] | None
# Programs kept in memory; the least recently used are forgotten.
MOST_PROGRAMS = 4096


@dataclass(frozen=True)
class Node:
    """An operator of a chunk: its plan, where its values come from, the slot of its first result, and who called it."""

    plan: Plan
    wires: tuple[int, ...]
    first: int
    place: Place


@dataclass(frozen=True)
class Compiled:
    """A program, and which of its parameters (externals, then one vector of numbers per dtype) it reads."""

    executable: Executable
    vectors: tuple[torch.dtype, ...]
    kept: tuple[bool, ...] | None


@dataclass(frozen=True)
class Part:
    """A program of a chunk.

    Attributes:
        numbered: positions in the chunk of its operators that take numbers, with their dtypes.
        externals: which of the chunk's externals it takes.
        outputs: the slots of its results.
    """

    compiled: Compiled
    numbered: tuple[tuple[int, tuple[torch.dtype, ...]], ...]
    externals: tuple[int, ...]
    outputs: tuple[int, ...]


Program = tuple[Part, ...]
Code = tuple[tuple[int, ...], tuple[int, ...]]

_programs: OrderedDict[Code, Program] = OrderedDict()
_compiled: OrderedDict[Code, Compiled] = OrderedDict()
_lock = threading.RLock()


def find(code: tuple[int, ...], outputs: tuple[int, ...], plans: Sequence[Plan], places: Sequence[Place]) -> Program:
    """The program of a chunk, made when first asked for.

    Raises:
        client_errors(): where XLA refuses it.
    """
    key = (code, outputs)
    program = _programs.get(key)
    if program is None:
        with _lock:
            program = _programs.get(key)
            if program is None:
                program = _keep(_programs, key, _parts(_nodes(code, plans, places), outputs))
    return program


def run(program: Program, externals: Sequence[Buffer], numbers: Sequence[Numbers]) -> dict[int, Buffer]:
    """Runs a chunk's parts; returns the buffer of each output slot."""
    results: dict[int, Buffer] = {}
    for part in program:
        compiled = part.compiled
        arguments = [externals[e] for e in part.externals]
        if compiled.vectors:
            arguments += _packed(part, numbers)
        if compiled.kept is not None:
            arguments = list(itertools.compress(arguments, compiled.kept))
        results.update(zip(part.outputs, compiled.executable(arguments), strict=True))
    metrics.count("execute", len(program))
    return results


def clear() -> None:
    """Forgets every program."""
    with _lock:
        _programs.clear()
        _compiled.clear()


def _keep(table: OrderedDict[Code, Any], key: Code, made: Any) -> Any:
    table[key] = made
    if len(table) > MOST_PROGRAMS:
        table.popitem(last=False)
    return made


def _packed(part: Part, numbers: Sequence[Numbers]) -> list[Buffer]:
    """The numbers of a part's operators, one vector for each dtype."""
    vectors: dict[torch.dtype, list[Any]] = {dtype: [] for dtype in part.compiled.vectors}
    for n, dtypes in part.numbered:
        for dtype, given in zip(dtypes, numbers[n] or (), strict=True):
            vectors[dtype].extend(given)
    with np.errstate(over="ignore"):
        return [client().put(np.asarray(given, types.numpy_dtype(dtype))) for dtype, given in vectors.items()]


def separate_numbers(plan: Plan, numbers: Numbers) -> list[Buffer]:
    """The numbers of one operator as its own program takes them."""
    with np.errstate(over="ignore"):
        return [
            client().put(np.asarray(given, types.numpy_dtype(dtype)).reshape(shape))
            for (shape, dtype), given in zip(plan.numbers, numbers or (), strict=True)
        ]


def _nodes(code: Sequence[int], plans: Sequence[Plan], places: Sequence[Place]) -> list[Node]:
    nodes = []
    begin = first = 0
    for plan, place in zip(plans, places, strict=False):
        end = begin + 1 + len(plan.bases)
        nodes.append(Node(plan, tuple(code[begin + 1 : end]), first, place))
        begin, first = end, first + len(plan.results)
    return nodes


# --- parts -------------------------------------------------------------------------------------------------------


def _parts(nodes: Sequence[Node], outputs: Sequence[int]) -> Program:
    """The programs of a chunk. What nobody asked for is left out."""
    wanted = set(outputs)
    needed = _needed(nodes, wanted)
    groups = _components(nodes, needed)
    by_code: defaultdict[Code, list[tuple[list[int], list[int], list[int]]]] = defaultdict(list)
    for members in groups:
        code, externals, slots = _canonical(nodes, members, wanted)
        by_code[code].append((members, externals, slots))
    # What is there once goes into one program: more would only cost more launches.
    single = sorted(n for found in by_code.values() if len(found) == 1 for n in found[0][0])
    repeated = [copy for found in by_code.values() if len(found) > 1 for copy in found]
    return tuple(
        _part(nodes, members, *_canonical(nodes, members, wanted))
        for members in [*(members for members, _, _ in repeated), *([single] if single else [])]
    )


def _part(nodes: Sequence[Node], members: Sequence[int], code: Code, externals: list[int], slots: list[int]) -> Part:
    compiled = _compiled.get(code)
    if compiled is None:
        compiled = _keep(_compiled, code, _compile(_renumbered(code[0], nodes, members), code[1]))
    numbered = tuple((n, tuple(dtype for _, dtype in nodes[n].plan.numbers)) for n in members if nodes[n].plan.numbers)
    return Part(compiled, numbered, tuple(externals), tuple(slots))


def _renumbered(code: Sequence[int], nodes: Sequence[Node], members: Sequence[int]) -> list[Node]:
    """Some of a chunk's operators as a chunk of their own."""
    return _nodes(code, [nodes[n].plan for n in members], [nodes[n].place for n in members])


def _needed(nodes: Sequence[Node], wanted: set[int]) -> list[int]:
    """The operators that lead to a wanted slot."""
    slots = set(wanted)
    needed = []
    for n in reversed(range(len(nodes))):
        node = nodes[n]
        if any(s in slots for s in range(node.first, node.first + len(node.plan.results))):
            needed.append(n)
            slots.update(~w for w in node.wires if w < 0)
    return needed[::-1]


def _components(nodes: Sequence[Node], members: Sequence[int]) -> list[list[int]]:
    """The operators grouped by whether results of one lead to another."""
    of_slot = {s: n for n in members for s in range(nodes[n].first, nodes[n].first + len(nodes[n].plan.results))}
    root = {n: n for n in members}

    def find_root(n: int) -> int:
        while root[n] != n:
            root[n] = root[root[n]]
            n = root[n]
        return n

    for n in members:
        for wire in nodes[n].wires:
            if wire < 0:
                root[find_root(n)] = find_root(of_slot[~wire])
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for n in members:
        groups[find_root(n)].append(n)
    return list(groups.values())


def _canonical(nodes: Sequence[Node], members: Sequence[int], wanted: set[int]) -> tuple[Code, list[int], list[int]]:
    """The code of some of a chunk's operators by themselves, the externals they take, the wanted slots they fill."""
    code: list[int] = []
    externals: dict[int, int] = {}
    slots: dict[int, int] = {}
    for n in members:
        node = nodes[n]
        code.append(node.plan.number)
        code.extend(~slots[~w] if w < 0 else externals.setdefault(w, len(externals)) for w in node.wires)
        for k in range(len(node.plan.results)):
            slots[node.first + k] = len(slots)
    asked = [s for s in slots if s in wanted]
    return (tuple(code), tuple(slots[s] for s in asked)), list(externals), asked


# --- one program -------------------------------------------------------------------------------------------------


def _compile(nodes: Sequence[Node], outputs: Sequence[int]) -> Compiled:
    """The program of some operators that returns these slots."""
    externals: dict[int, module.Spec] = {}
    for node in nodes:
        for wire, spec in zip(node.wires, node.plan.values, strict=True):
            if wire >= 0:
                externals.setdefault(wire, spec)
    sizes: dict[torch.dtype, int] = {}
    for node in nodes:
        for shape, dtype in node.plan.numbers:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
    parameters = [*externals.values(), *(((size,), dtype) for dtype, size in sizes.items())]

    def body(*arrays: Array) -> list[Array]:
        vectors = dict(zip(sizes, arrays[len(externals) :], strict=True))
        taken = dict.fromkeys(sizes, 0)
        slots: list[Array] = []
        for node in nodes:
            operands = [slots[~w] if w < 0 else arrays[w] for w in node.wires]
            for shape, dtype in node.plan.numbers:
                begin = taken[dtype]
                taken[dtype] += math.prod(shape)
                operands.append(hlo.reshape(hlo.slice_(vectors[dtype], [begin], [taken[dtype]]), shape))
            with _named(node):
                slots.extend(
                    _unless_refused(node.plan, operands, module.call(node.plan.module, operands, node.plan.results))
                )
        return [slots[s] for s in outputs]

    target = module.Target(client().platform_name)
    with module.building, metrics.timed("trace_seconds"):
        built, results = module.build("fused", target, parameters, body)
        used = module.drop_unused_parameters(built)
    operations = set().union(*(node.plan.operations for node in nodes))
    executable = client().compile(
        built,
        [(shape, types.numpy_dtype(dtype)) for shape, dtype in results],
        options=options_for(operations) if client().is_host_memory else None,
        custom_calls=set().union(*(node.plan.custom_calls for node in nodes)),
    )
    metrics.count("fused_program")
    programs.fused([n.plan.number for n in nodes], [n.plan.name for n in nodes], len(outputs))
    return Compiled(executable, tuple(sizes), None if all(used) else tuple(used))


def _named(node: Node) -> contextlib.AbstractContextManager[Any]:
    return module.named(where(node.place)) if client().names_operators else contextlib.nullcontext()


def _unless_refused(plan: Plan, operands: Sequence[Array], results: list[Array]) -> list[Array]:
    """An operator's results, but the old value of what it writes where one of its conditions does not hold.

    The error comes only when somebody looks; until then the write must not have happened.
    """
    for i, written, _ in plan.writes:
        if plan.checks and i in plan.bases:
            old, new = operands[plan.bases.index(i)], results[written]
            if (old.shape, old.dtype) == (new.shape, new.dtype):
                for condition, *_ in plan.checks:
                    results[written] = hlo.select(results[condition], results[written], old)
    return results
