"""The operations of a compiled program, read from the text of its optimised HLO, and how long each may take.

The time of a matrix product, a convolution, a sort, a gather or a scatter is the compiler's `estimated_cycles` over the
clock. Its cycles for fusions of elementwise operations and reductions are 1.8 to 3.4 times what moving their bytes
takes (libtpu 0.0.52, x + x with 128 MiB on each generation), so for these it is the bytes over the bandwidth. Bytes
are those moved from and to HBM, padding included; copies that run beside others take no time of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_tpu.planner.machine import Machine
from torch_tpu.planner.tiled_layout import HBM, Shape, shapes

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(
    r"(?:calls|body|to_apply|called_computations|branch_computations)=\{?(%?[\w.\-]+(?:, ?%?[\w.\-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ENTRY_LAYOUT = "entry_computation_layout="
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id"}
    | {"after-all", "copy-done", "slice-done", "async-done", "async-update"}
)
_ASYNCHRONOUS = frozenset({"copy-start", "slice-start", "async-start"})
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?$")
_PRODUCTS = frozenset({"convolution", "dot"})
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})
_OTHERS = frozenset(
    {"sort", "scatter", "gather", "custom-call", "rng-bit-generator", "fft", "cholesky", "triangular-solve"}
)


@dataclass(frozen=True)
class Instruction:
    """A line of HLO: what it makes, its operation, what stands in its parentheses, its attributes."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    inside: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.inside))

    @property
    def called(self) -> list[str]:
        return [name.strip().lstrip("%") for found in _CALLED.findall(self.attributes) for name in found.split(",")]


@dataclass
class HloOperation:
    """What one operation costs, all its repetitions together.

    Attributes:
        place: "file:line/operator" of the user's program; empty where the compiler does not say.
        kind: HLO's name of what it does.
        bytes: from and to HBM.
        hidden: it runs beside other operations.
        float32: a product of float32 operands.
    """

    place: str
    kind: str
    seconds: float
    bytes: float
    hidden: bool = False
    float32: bool = False
    collective_bytes: float = 0.0


@dataclass
class ReadProgram:
    """A program's operations, and the layouts of its parameters and results."""

    operations: list[HloOperation] = field(default_factory=list)
    parameters: tuple[Shape, ...] = ()
    results: tuple[Shape, ...] = ()


def read(text: str, machine: Machine) -> ReadProgram:
    """The operations in the text of a module; none if it is empty."""
    computations, entry = _computations(text)
    begin = text.find(_ENTRY_LAYOUT) + len(_ENTRY_LAYOUT)
    given, _, returned = text[begin : _closing(text, begin)].partition(")->") if computations else ("", "", "")
    parameters, results = tuple(shapes(given)), tuple(shapes(returned))
    found = list(_costs(computations, entry, machine, 1)) if entry else []
    return ReadProgram(found, parameters, results)


def _computations(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif (found := _INSTRUCTION.match(line)) is not None:
            current[found[1]] = _instruction(found[1], found[2])
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    close = _closing("(" + rest, 0) - 1
    return Instruction(name, tuple(shapes(text[:end])), opcode, rest[:close], rest[close + 1 :])


def _closing(text: str, begin: int) -> int:
    """Where the bracket at `begin` closes."""
    opening = text[begin]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if not depth:
            return i
    return len(text)


def _costs(
    computations: dict[str, dict[str, Instruction]], name: str, machine: Machine, times: int
) -> Iterator[HloOperation]:
    instructions = computations.get(name, {})
    for i in instructions.values():
        if i.opcode in _FREE:
            continue
        if i.opcode in ("while", "call", "conditional"):
            trips = _TRIPS.search(i.attributes)
            for called in i.called:
                yield from _costs(computations, called, machine, times * (int(trips[1]) if trips else 1))
            continue
        yield _cost(i, instructions, computations, machine, times)


def _cost(
    i: Instruction,
    around: dict[str, Instruction],
    computations: dict[str, dict[str, Instruction]],
    machine: Machine,
    times: int,
) -> HloOperation:
    inner = [x for called in i.called for x in computations.get(called, {}).values()]
    opcodes = {i.opcode, *(x.opcode for x in inner)}
    moved = float(_bytes(i, around, inner))
    found = _CYCLES.search(i.attributes)
    by_cycles = int(found[1]) / machine.clock if found else 0.0
    by_bytes = moved / machine.bandwidth
    product = bool(opcodes & _PRODUCTS)
    if product or opcodes & _OTHERS or not by_bytes:
        seconds = max(by_cycles, by_bytes)
    else:
        seconds = min(by_cycles, by_bytes) if by_cycles else by_bytes
    name = _NAME.search(i.attributes) or next(filter(None, (_NAME.search(x.attributes) for x in reversed(inner))), None)
    collective = sum(s.bytes for s in i.shapes) if _COLLECTIVE.match(i.opcode) else 0
    return HloOperation(
        name[1] if name else "",
        _kind(i, opcodes),
        seconds * times,
        moved * times,
        i.opcode in _ASYNCHRONOUS,
        product and _is_float32(i, around, inner),
        float(collective * times),
    )


def _kind(i: Instruction, opcodes: set[str]) -> str:
    if opcodes & _PRODUCTS:
        return "matrix product"
    for kind in ("sort", "scatter", "gather", "custom-call", "reduce-window", "reduce"):
        if kind in opcodes:
            return kind
    return "elementwise" if i.opcode == "fusion" else i.opcode


def _is_float32(i: Instruction, around: dict[str, Instruction], inner: list[Instruction]) -> bool:
    products = [x for x in [i, *inner] if x.opcode in _PRODUCTS]
    known = {**around, **{x.name: x for x in inner}}
    return any(
        all(known[o].shapes and known[o].shapes[0].dtype == "f32" for o in x.operands if o in known) for x in products
    )


def _bytes(i: Instruction, around: dict[str, Instruction], inner: list[Instruction]) -> int:
    """Bytes from and to HBM. Of what is only sliced or updated in place, those of the slices."""
    if i.opcode in _ASYNCHRONOUS:
        return i.shapes[0].bytes if i.opcode != "async-start" else 0
    total = 0
    for position, operand in enumerate(i.operands):
        made = around.get(operand)
        if made is not None and made.shapes and all(s.space == HBM for s in made.shapes):
            total += _read_bytes(made, _users(position, inner) or [i])
    updates = {x.shapes[0].sizes: x for x in [i, *inner] if x.opcode == "dynamic-update-slice"}
    local = {**around, **{x.name: x for x in inner}}
    for shape in i.shapes:
        if shape.space == HBM:
            update = updates.get(shape.sizes)
            total += local[update.operands[1]].shapes[0].bytes if update is not None else shape.bytes
    return total


def _users(position: int, inner: list[Instruction]) -> list[Instruction]:
    """What reads a parameter of a fusion."""
    name = next((x.name for x in inner if x.opcode == "parameter" and x.inside == str(position)), None)
    return [x for x in inner if name in x.operands]


def _read_bytes(made: Instruction, users: list[Instruction]) -> int:
    whole = sum(s.bytes for s in made.shapes)
    if all(x.opcode in _SLICES and x.shapes for x in users):
        return min(whole, sum(x.shapes[0].bytes for x in users))
    if all(x.opcode == "dynamic-update-slice" and made.name != x.operands[1] for x in users):
        return 0
    return whole
