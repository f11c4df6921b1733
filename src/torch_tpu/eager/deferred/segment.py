"""Programs of fused eager: a run of recorded operators as one StableHLO module, or as several where it falls apart.

A segment is described by *code*: for each operator its plan's number, then for each of its values either the number of
an external buffer, by first use, or ~n for slot n, counted from the segment's first result. Equal codes with equal
outputs are the same program, whatever tensors they run on. Operators that have nothing but externals in common (the
steps of an optimizer for different parameters) are separate parts; parts with equal code share one executable, so
that a hundred equal parameters compile once.

An external that nobody needs afterwards may be donated: the program then writes one of its outputs into that memory.
Which output, if any, follows from the code (`Segment.aliases`); which externals are donated is part of the key of the
program.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_tpu import delayed, hooks, metrics
from torch_tpu.eager.program.plan import Plan, ScalarArguments, new_target
from torch_tpu.hlo import types
from torch_tpu.metrics import programs
from torch_tpu.metrics.user_lines import CallSite, where
from torch_tpu.recent import Recent
from torch_tpu.runtime.client import Buffer, Executable
from torch_tpu.runtime.cpu_options import LEAST_MEMORY, options_for
from torch_tpu.runtime.process_client import client

if TYPE_CHECKING:
    from torch_tpu.hlo import array as hlo
    from torch_tpu.hlo import module
    from torch_tpu.hlo.array import Array
else:
    hlo = delayed.module("torch_tpu.hlo.array", globals(), "hlo")
    module = delayed.module("torch_tpu.hlo.module", globals(), "module")

# Programs kept in memory; the least recently used are forgotten.
MOST_PROGRAMS = 4096
# So many programs of one segment that differ in what is donated.
MOST_DONATIONS = 16


@dataclass(frozen=True)
class Node:
    """An operator of a segment: its plan, where its values come from, the slot of its first result, its call site."""

    plan: Plan
    wires: tuple[int, ...]
    first: int
    place: CallSite


@dataclass(frozen=True)
class CompiledSegment:
    """A program, and which of its parameters (externals, then one vector of numbers per dtype) it reads."""

    executable: Executable
    vectors: tuple[torch.dtype, ...]
    kept: tuple[bool, ...] | None


@dataclass(frozen=True)
class SegmentProgram:
    """A program of a segment.

    Attributes:
        numbered: positions in the segment of its operators that take numbers, with their dtypes.
        externals: which of the segment's externals it takes; `donated` are those whose memory it reuses.
        outputs: the slots of its results.
    """

    compiled: CompiledSegment
    numbered: tuple[tuple[int, tuple[torch.dtype, ...]], ...]
    externals: tuple[int, ...]
    donated: tuple[int, ...]
    outputs: tuple[int, ...]


Program = tuple[SegmentProgram, ...]
# Operators and their wires, and the slots wanted of them.
Code = tuple[tuple[int, ...], tuple[int, ...]]
# For some parameters the position of the output that reuses their memory.
Donations = tuple[tuple[int, int], ...]


class Segment:
    """A run of recorded operators of which some slots are wanted.

    Attributes:
        aliases: for each external that may be donated, the output slot that would take its memory.
    """

    __slots__ = ("_code", "_programs", "aliases")

    def __init__(self, code: Code, plans: Sequence[Plan], places: Sequence[CallSite]) -> None:
        self._code = code
        self._programs: dict[tuple[int, ...], Program] = {}
        nodes = _nodes(code[0], plans, places)
        self.aliases = _aliases(nodes, _needed(nodes, set(code[1])), code[1])

    def program(self, donated: tuple[int, ...], plans: Sequence[Plan], places: Sequence[CallSite]) -> Program:
        """The program that reuses the memory of these externals, made when first asked for.

        Raises:
            client_errors(): where XLA refuses it.
        """
        program = self._programs.get(donated)
        if program is None:
            with _lock:
                program = self._programs.get(donated)
                if program is None:
                    aliases = {e: self.aliases[e] for e in donated}
                    nodes = _nodes(self._code[0], plans, places)
                    if len(self._programs) >= MOST_DONATIONS:
                        self._programs.clear()
                    program = self._programs[donated] = _parts(nodes, self._code[1], aliases)
        return program


_segments: Recent[Code, Segment] = Recent(MOST_PROGRAMS)
_compiled: Recent[tuple[Code, Donations], CompiledSegment] = Recent(MOST_PROGRAMS)
_lock = threading.RLock()


def find(code: tuple[int, ...], outputs: tuple[int, ...], plans: Sequence[Plan], places: Sequence[CallSite]) -> Segment:
    """What is known of a run of operators."""
    key = (code, outputs)
    with _lock:
        found = _segments.find(key)
        return _segments.keep(key, Segment(key, plans, places)) if found is None else found


def arguments(program: Program, externals: Sequence[Buffer], numbers: Sequence[ScalarArguments]) -> list[list[Buffer]]:
    """What each part of a program is called with."""
    result = []
    for part in program:
        compiled = part.compiled
        given = [externals[e] for e in part.externals]
        if compiled.vectors:
            given += _packed(part, numbers)
        result.append(given if compiled.kept is None else list(itertools.compress(given, compiled.kept)))
    return result


@hooks.keeps_programs
def clear() -> None:
    """Forgets every program."""
    with _lock:
        _segments.clear()
        _compiled.clear()


def _packed(part: SegmentProgram, numbers: Sequence[ScalarArguments]) -> list[Buffer]:
    """The numbers of a part's operators, one vector for each dtype."""
    vectors: dict[torch.dtype, list[Any]] = {dtype: [] for dtype in part.compiled.vectors}
    for n, dtypes in part.numbered:
        for dtype, given in zip(dtypes, numbers[n] or (), strict=True):
            vectors[dtype].extend(given)
    with np.errstate(over="ignore"):
        return [client().put(np.asarray(given, types.numpy_dtype(dtype))) for dtype, given in vectors.items()]


def separate_numbers(plan: Plan, numbers: ScalarArguments) -> list[Buffer]:
    """The numbers of one operator as its own program takes them."""
    with np.errstate(over="ignore"):
        return [
            client().put(np.asarray(given, types.numpy_dtype(dtype)).reshape(shape))
            for (shape, dtype), given in zip(plan.numbers, numbers or (), strict=True)
        ]


def _nodes(code: Sequence[int], plans: Sequence[Plan], places: Sequence[CallSite]) -> list[Node]:
    nodes = []
    begin = first = 0
    for plan, place in zip(plans, places, strict=False):
        end = begin + 1 + len(plan.bases)
        nodes.append(Node(plan, tuple(code[begin + 1 : end]), first, place))
        begin, first = end, first + len(plan.results)
    return nodes


# --- parts -------------------------------------------------------------------------------------------------------


def _parts(nodes: Sequence[Node], outputs: Sequence[int], aliases: Mapping[int, int]) -> Program:
    """The programs of a segment. What nobody asked for is left out.

    Args:
        aliases: the output slot that takes the memory of each donated external.
    """
    wanted = set(outputs)
    needed = _needed(nodes, wanted)
    groups = _components(nodes, needed)
    by_code: defaultdict[Any, list[list[int]]] = defaultdict(list)
    for members in groups:
        code, externals, slots = _canonical(nodes, members, wanted)
        by_code[code, _donations(externals, slots, aliases)].append(members)
    # What is there once goes into one program: more would only cost more launches.
    single = sorted(n for found in by_code.values() if len(found) == 1 for n in found[0])
    repeated = [members for found in by_code.values() if len(found) > 1 for members in found]
    return tuple(
        _part(nodes, members, *_canonical(nodes, members, wanted), aliases)
        for members in [*repeated, *([single] if single else [])]
    )


def _part(
    nodes: Sequence[Node],
    members: Sequence[int],
    code: Code,
    externals: list[int],
    slots: list[int],
    aliases: Mapping[int, int],
) -> SegmentProgram:
    donations = _donations(externals, slots, aliases)
    compiled = _compiled.find((code, donations))
    if compiled is None:
        own = _renumbered(code[0], nodes, members)
        compiled = _compiled.keep((code, donations), _compile(own, code[1], donations))
    numbered = tuple((n, tuple(dtype for _, dtype in nodes[n].plan.numbers)) for n in members if nodes[n].plan.numbers)
    return SegmentProgram(
        compiled, numbered, tuple(externals), tuple(e for e in externals if e in aliases), tuple(slots)
    )


def _donations(externals: list[int], slots: list[int], aliases: Mapping[int, int]) -> Donations:
    return tuple((k, slots.index(aliases[e])) for k, e in enumerate(externals) if e in aliases)


def _aliases(nodes: Sequence[Node], needed: Sequence[int], outputs: Sequence[int]) -> dict[int, int]:
    """For externals that may be donated, the output slot that can take their memory.

    That is a result of the same shape and dtype, computed from everything that reads the external: so XLA need not
    copy the external to keep it for a later reader. An operator that writes it in place may read it too.
    """
    producer: dict[int, int] = {}
    readers: defaultdict[int, int] = defaultdict(int)
    specs: dict[int, module.Spec] = {}
    # As sets of bits: the operators that lead to each, itself included.
    leading: dict[int, int] = {}
    for n in needed:
        node = nodes[n]
        producer.update((node.first + k, n) for k in range(len(node.plan.results)))
        leading[n] = 1 << n
        for wire, spec in zip(node.wires, node.plan.values, strict=True):
            if wire < 0:
                leading[n] |= leading[producer[~wire]]
            else:
                readers[wire] |= 1 << n
                specs[wire] = spec

    def written(slot: int) -> int | None:
        """The external whose storage the slot's operator, or a chain of them, writes."""
        while True:
            node = nodes[producer[slot]]
            inputs = [i for i, result, _ in node.plan.writes if result == slot - node.first and i in node.plan.bases]
            if not inputs:
                return None
            wire = node.wires[node.plan.bases.index(inputs[0])]
            if wire >= 0:
                return wire
            slot = ~wire

    aliases: dict[int, int] = {}
    left = []
    for slot in outputs:
        node, leads = nodes[producer[slot]], leading[producer[slot]]
        external = written(slot)
        spec = node.plan.results[slot - node.first]
        if (
            external is not None
            and external not in aliases
            and specs[external] == spec
            and readers[external] & ~leads == 0
        ):
            aliases[external] = slot
        else:
            left.append((slot, spec, leads & ~(1 << producer[slot])))
    by_spec: defaultdict[module.Spec, list[int]] = defaultdict(list)
    for external, spec in specs.items():
        if external not in aliases:
            by_spec[spec].append(external)
    for slot, spec, leads in left:
        external = next((e for e in by_spec[spec] if readers[e] & ~leads == 0), None)
        if external is not None:
            by_spec[spec].remove(external)
            aliases[external] = slot
    return aliases


def _renumbered(code: Sequence[int], nodes: Sequence[Node], members: Sequence[int]) -> list[Node]:
    """Some of a segment's operators as a segment of their own."""
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
    """The code of some of a segment's operators by themselves, the externals they take, the wanted slots they fill."""
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


def _compile(nodes: Sequence[Node], outputs: Sequence[int], donations: Donations) -> CompiledSegment:
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

    target = new_target()
    with module.building, metrics.timed("trace_seconds"):
        built, results = module.build("fused", target, parameters, body)
        used = module.drop_unused_parameters(built)
        module.reuse_parameters(built, [(sum(used[:parameter]), result) for parameter, result in donations])
    operations: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in nodes:
        operations.update(node.plan.operations)
    executable = client().compile(
        built,
        [(shape, types.numpy_dtype(dtype)) for shape, dtype in results],
        options={**options_for(operations), **LEAST_MEMORY} if client().runs_on_cpu else None,
        custom_calls=set().union(*(node.plan.custom_calls for node in nodes)),
    )
    for node in nodes:
        node.plan.call = None  # the compiler has code for it
    metrics.count("fused_program")
    programs.fused([n.plan.number for n in nodes], [n.plan.name for n in nodes], len(outputs))
    return CompiledSegment(executable, tuple(sizes), None if all(used) else tuple(used))


def _named(node: Node) -> contextlib.AbstractContextManager[Any]:
    return module.named(where(node.place)) if client().names_operators else contextlib.nullcontext()


def _unless_refused(plan: Plan, operands: Sequence[Array], results: list[Array]) -> list[Array]:
    """An operator's results, but the old value of what it writes where one of its conditions does not hold.

    The error comes only when somebody looks; until then the write must not have happened.
    """
    for i, written, _ in plan.writes:
        if plan.checks and not plan.guarded and i in plan.bases:
            old, new = operands[plan.bases.index(i)], results[written]
            if (old.shape, old.dtype) == (new.shape, new.dtype):
                for condition, *_ in plan.checks:
                    results[written] = hlo.select(results[condition], results[written], old)
    return results
