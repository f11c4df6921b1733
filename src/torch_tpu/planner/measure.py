"""Computes the figures of a plan from the record of a script and the compiler's answers about its programs."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_tpu.planner import hlo_text
from torch_tpu.planner.compiling import Answer, Refusal
from torch_tpu.planner.figures import Held, HostWait, Memory, Operation, Plan, ProgramFigures
from torch_tpu.planner.machine import Machine
from torch_tpu.planner.recorder import INPUT, OTHER, ROLES, Record, Run, Thing, places_of_results
from torch_tpu.planner.script import StepWindow
from torch_tpu.runtime.analysis import Analysis
from torch_tpu.runtime.topology import AheadOfTimeProgram

TEMPORARIES, CODE = "temporaries", "code"
PARTS = (*ROLES, TEMPORARIES, CODE)
COSTLIEST = 10
MOST_HELD = 24
_LINES = re.compile(r"(?:an unknown place/?)|(.+?:\d+)(?:/|$)")
_NUMPY = re.compile(r"([a-z]+)(\d.*)?$")
_LETTER = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c", "bool": "pred"}


@dataclass(frozen=True)
class Compiled:
    """A program, the compiler's answer and what its HLO says."""

    answer: Answer
    read: hlo_text.ReadProgram


def measure(
    record: Record,
    window: StepWindow,
    answers: Mapping[AheadOfTimeProgram, Answer],
    machine: Machine,
    target: str,
    tokens: int = 0,
    samples: int = 0,
) -> Plan:
    """The plan of one device.

    Args:
        answers: of the programs in the window.
        tokens, samples: of a step, where the caller knows better than what is found in the batch.
    """
    compiled = {
        p: Compiled(a, hlo_text.read(a.hlo, machine) if isinstance(a, Analysis) else hlo_text.ReadProgram())
        for p, a in answers.items()
    }
    runs = record.runs[window.begin : window.end]
    times = Counter(run.program for run in runs)
    programs = [_program(p, n, compiled[p], machine) for p, n in times.items()]
    programs.sort(key=lambda f: -f.seconds * f.runs)
    seconds = sum(f.seconds * f.runs for f in programs)
    flops = sum(f.flops * f.runs for f in programs)
    memory, padding = _memory(record, window, compiled, machine)
    found_samples, found_tokens = batch(record, window)
    earlier = {run.program for run in record.runs[: window.begin]}
    bounds: dict[str, float] = defaultdict(float)
    for f in programs:
        bounds[f.bound] += f.seconds * f.runs
    refused = [f for f in programs if f.refused]
    fits = memory.fits and not refused
    return Plan(
        target=target,
        device=machine.generation.name,
        peak_flops=machine.flops,
        bandwidth=machine.bandwidth,
        step=window.kind,
        steps=window.steps,
        ended=window.ended,
        fits=fits,
        verdict=_verdict(memory, refused),
        memory=memory,
        flops=flops,
        bytes=sum(f.bytes * f.runs for f in programs),
        seconds=seconds,
        compiler_seconds=sum(f.compiler_seconds * f.runs for f in programs),
        bound=max(bounds, key=lambda name: bounds[name]) if bounds else "",
        utilisation=flops / seconds / machine.flops if seconds else 0.0,
        samples=samples or found_samples,
        tokens=tokens or found_tokens,
        programs=programs,
        operations=_operations(times, compiled, seconds),
        waits=_waits(record, window),
        recompiled=sum(1 for p in times if p not in earlier) if window.steps > 1 else 0,
        compile_seconds=sum(f.compile_seconds for f in programs),
        padding=padding,
        float32=_float32(times, compiled),
    )


def _float32(
    times: Mapping[AheadOfTimeProgram, int], compiled: Mapping[AheadOfTimeProgram, Compiled]
) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for program, runs in times.items():
        for o in compiled[program].read.operations:
            if o.float32:
                found[split_place(o.place)[0] or "an unknown line"] += o.seconds * runs
    return dict(found)


def _verdict(memory: Memory, refused: Sequence[ProgramFigures]) -> str:
    gib = f"{memory.peak / 2**30:,.2f} of {memory.limit / 2**30:,.2f} GiB"
    other = next((f.refused for f in refused if "hbm" not in f.refused.lower()), None)
    if other is not None:
        return f"does not compile: {other}"
    return f"fits: {gib} at the peak" if memory.fits and not refused else f"does not fit: needs {gib}"


def _program(program: AheadOfTimeProgram, runs: int, compiled: Compiled, machine: Machine) -> ProgramFigures:
    answer, read = compiled.answer, compiled.read
    count = sum(1 for _ in program.module.body.operations)
    if isinstance(answer, Refusal):
        name = next(filter(None, places_of_results(program)), "")
        return ProgramFigures(name, runs, count, refused=answer.message)
    by_place: dict[str, float] = defaultdict(float)
    for o in read.operations:
        line = split_place(o.place)[0]
        if line and not o.hidden:
            by_place[line] += o.seconds
    moved = sum(o.bytes for o in read.operations) if read.operations else answer.bytes_accessed
    limits = {
        "compute": answer.flops / machine.flops,
        "HBM": moved / machine.bandwidth,
        "interconnect": sum(o.collective_bytes for o in read.operations) / machine.generation.ici_bandwidth_per_device,
    }
    busy = sum(o.seconds for o in read.operations if not o.hidden)
    padding = sum(s.bytes - s.logical_bytes for s in (*read.parameters, *read.results))
    return ProgramFigures(
        name=max(by_place, key=lambda name: by_place[name]) if by_place else "",
        runs=runs,
        operations=count,
        flops=answer.flops,
        bytes=moved,
        seconds=max(busy, *limits.values()),
        compiler_seconds=answer.seconds + (math.ceil(-answer.seconds) if answer.seconds < 0 else 0),
        compute_seconds=limits["compute"],
        memory_seconds=limits["HBM"],
        network_seconds=limits["interconnect"],
        bound=max(limits, key=lambda name: limits[name]),
        argument_bytes=answer.argument_bytes,
        output_bytes=answer.output_bytes,
        alias_bytes=answer.alias_bytes,
        temporary_bytes=answer.temporary_bytes,
        code_bytes=answer.code_bytes,
        padded_bytes=padding,
        compile_seconds=answer.compile_seconds,
    )


def split_place(name: str) -> tuple[str, str]:
    """The innermost "file:line" and the operator of an operation's name; graphs name the call and its operators."""
    rest, _, operator = name.rpartition("/")
    lines = [line for line in _LINES.findall(rest) if line]
    return (lines[-1] if lines else ""), operator


def _operations(
    times: Mapping[AheadOfTimeProgram, int], compiled: Mapping[AheadOfTimeProgram, Compiled], total: float
) -> list[Operation]:
    grouped: dict[tuple[str, str, str], list[float]] = {}
    for program, runs in times.items():
        for o in compiled[program].read.operations:
            entry = grouped.setdefault((*split_place(o.place), o.kind), [0.0, 0.0, 0.0])
            entry[0] += 0.0 if o.hidden else o.seconds * runs
            entry[1] += o.bytes * runs
            entry[2] += runs
    ranked = sorted(grouped.items(), key=lambda item: -item[1][0])[:COSTLIEST]
    return [
        Operation(line, operator, kind, s, s / total if total else 0.0, b, int(n))
        for (line, operator, kind), (s, b, n) in ranked
    ]


def _waits(record: Record, window: StepWindow) -> list[HostWait]:
    found: dict[tuple[str, bool], list[int]] = {}
    for n, read in enumerate(record.reads):
        # A training step ends with the optimizer's; what is read behind it counts with the next.
        if n in window.reads if window.reads is not None else window.begin < read.after <= window.end:
            entry = found.setdefault((read.place, read.fallback), [0, 0])
            entry[0] += 1
            entry[1] += read.nbytes
    return [
        HostWait(line, n, nbytes, fallback)
        for (line, fallback), (n, nbytes) in sorted(found.items(), key=lambda item: -item[1][0])
    ]


def batch(record: Record, window: StepWindow) -> tuple[int, int]:
    """Samples and tokens of a step: of the largest kind of integer matrix among what the step reads, else of the
    largest other array; what the host wrote for this step comes before what it wrote earlier."""
    used = {t for run in record.runs[window.begin : window.end] for t in run.arguments if t.shape}
    written = [t for t in used if t.role == INPUT]
    fresh = [t for t in written if t.born >= window.begin]
    for candidates in (fresh, written, [t for t in used if t.role == OTHER and t.born < window.begin]):
        matrices = [t for t in candidates if len(t.shape) == 2 and "int" in t.dtype]
        if matrices:
            largest = max(matrices, key=lambda t: t.nbytes)
            equal = sum(1 for t in matrices if t.shape == largest.shape and t.dtype == largest.dtype)
            # A batch and its labels are two matrices of one shape.
            batches = max(equal // 2, 1) if candidates is fresh else 1
            return largest.shape[0] * batches, math.prod(largest.shape) * batches
    for candidates in (fresh, written):
        arrays = [t for t in candidates if len(t.shape) > 1]
        if arrays:
            return max(arrays, key=lambda t: t.nbytes).shape[0], 0
    return 0, 0


# --- memory ------------------------------------------------------------------------------------------------------


class _Sizes:
    """How many bytes values take as the compiler lays them out."""

    def __init__(self, compiled: Mapping[AheadOfTimeProgram, Compiled]) -> None:
        self.results = {p: c.read.results for p, c in compiled.items()}
        self.usual: dict[tuple[str, tuple[int, ...]], int] = {}
        for c in compiled.values():
            for s in (*c.read.results, *c.read.parameters):
                self.usual[s.dtype, s.sizes] = s.bytes

    def of(self, thing: Thing) -> int:
        results = self.results.get(thing.program) if thing.program is not None else None
        if results and thing.result < len(results) and results[thing.result].sizes == thing.shape:
            return results[thing.result].bytes
        return self.usual.get((hlo_dtype(thing.dtype), thing.shape), thing.nbytes)


def hlo_dtype(name: str) -> str:
    """numpy's name of a dtype in HLO's words: "bfloat16" → "bf16"."""
    found = _NUMPY.match(name)
    if found is None or found[1] not in _LETTER:
        return name
    return _LETTER[found[1]] + (found[2] or "").replace("_", "")


def _memory(
    record: Record, window: StepWindow, compiled: Mapping[AheadOfTimeProgram, Compiled], machine: Machine
) -> tuple[Memory, dict[str, int]]:
    """The memory of a step, and what of its peak is padding."""
    sizes = _Sizes(compiled)
    count = window.end - window.begin
    changes = [dict.fromkeys(ROLES, 0) for _ in range(count + 1)]
    for thing in record.things:
        first = max(thing.born, window.begin) - window.begin
        last = (window.end if thing.died is None else min(thing.died, window.end)) - window.begin
        if first < last:
            nbytes = sizes.of(thing)
            changes[first][thing.role] += nbytes
            changes[last][thing.role] -= nbytes
    code = sum(c.answer.code_bytes for c in compiled.values() if isinstance(c.answer, Analysis))
    over_step = []
    now = dict.fromkeys(ROLES, 0)
    for run, change in zip(record.runs[window.begin : window.end], changes, strict=False):
        for role in ROLES:
            now[role] += change[role]
        over_step.append({**now, TEMPORARIES: _temporaries(run, compiled, sizes), CODE: code})
    totals = [sum(parts.values()) for parts in over_step] or [0]
    peak = max(totals)
    at = totals.index(peak)
    padding: dict[str, int] = defaultdict(int)
    for thing in record.living(window.begin + at):
        if wasted := sizes.of(thing) - thing.nbytes:
            padding[f"{thing.dtype}{list(thing.shape)}"] += wasted
    memory = Memory(
        limit=machine.usable_bytes,
        peak=peak,
        fits=peak <= machine.usable_bytes,
        parts=over_step[at] if over_step else dict.fromkeys(PARTS, 0),
        held=_held(record, window.begin + at, sizes),
        over_step=over_step,
        setup_peak=_setup_peak(record, window, sizes),
    )
    return memory, dict(padding)


def _temporaries(run: Run, compiled: Mapping[AheadOfTimeProgram, Compiled], sizes: _Sizes) -> int:
    """Scratch memory of a program, less the results that take the place of arguments."""
    answer = compiled[run.program].answer
    if isinstance(answer, Analysis):
        return answer.temporary_bytes - answer.alias_bytes
    return max(answer.needs - sum(sizes.of(t) for t in (*set(run.arguments), *run.results)), 0)


def _held(record: Record, during: int, sizes: _Sizes) -> list[Held]:
    lines: dict[AheadOfTimeProgram, list[str]] = {}
    grouped: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    for thing in record.living(during):
        line = thing.place
        if thing.program is not None and thing.role in (OTHER, INPUT):
            if thing.program not in lines:
                lines[thing.program] = places_of_results(thing.program)
            line = lines[thing.program][thing.result]
        entry = grouped.setdefault((thing.role, thing.dtype, thing.shape, line), [0, 0])
        entry[0] += 1
        entry[1] += sizes.of(thing)
    ranked = sorted(grouped.items(), key=lambda item: -item[1][1])[:MOST_HELD]
    return [Held(role, dtype, shape, n, b, line) for (role, dtype, shape, line), (n, b) in ranked]


def _setup_peak(record: Record, window: StepWindow, sizes: _Sizes) -> int:
    changes: dict[int, int] = defaultdict(int)
    for thing in record.things:
        changes[thing.born] += sizes.of(thing)
        if thing.died is not None:
            changes[thing.died] -= sizes.of(thing)
    now = peak = 0
    for at in sorted(changes):
        if at >= window.begin:
            break
        now += changes[at]
        peak = max(peak, now)
    return peak
