"""The figures of a plan, as plain dataclasses that `dataclasses.asdict` turns into JSON. Bytes, seconds, FLOP/s."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operation:
    """Operations of one kind at one line of the user's program, over a step.

    Attributes:
        line: "file:line" and `operator`; empty where the compiler does not say.
        share: of the step's time.
    """

    line: str
    operator: str
    kind: str
    seconds: float
    share: float
    bytes: float
    count: int


@dataclass(frozen=True)
class ProgramFigures:
    """One program and what it costs each time it runs.

    Attributes:
        name: the line that most of its time goes to.
        runs: in a step.
        seconds: predicted, by `planner.hlo_text`.
        compiler_seconds: by the compiler's `optimal_seconds`, without the -1 for each operation it does not know.
        compute_seconds, memory_seconds, network_seconds: the least that FLOPs, bytes and collectives can take.
        bound: which of them is largest: "compute", "HBM" or "interconnect".
        padded_bytes: bytes of parameters and results that are padding.
        refused: what the compiler said instead.
    """

    name: str
    runs: int
    operations: int
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    compiler_seconds: float = 0.0
    compute_seconds: float = 0.0
    memory_seconds: float = 0.0
    network_seconds: float = 0.0
    bound: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    padded_bytes: int = 0
    compile_seconds: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Held:
    """Equal values that lie in memory at the peak: of one role, shape, dtype and origin."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    line: str


@dataclass(frozen=True)
class Memory:
    """HBM of one device.

    Attributes:
        limit: what the compiler lets a program use.
        peak: the most that is in use at one time in a step.
        parts: the peak by role; "temporaries" are those of the program that runs then, "code" that of all programs.
        held: the values at the peak, largest first.
        over_step: the parts for each program of the step, in order.
        setup_peak: the most that values take before the step, without temporaries.
    """

    limit: int
    peak: int
    fits: bool
    parts: dict[str, int]
    held: list[Held]
    over_step: list[dict[str, int]]
    setup_peak: int


@dataclass(frozen=True)
class HostWait:
    """The host reads values at a line, `count` times in a step."""

    line: str
    count: float
    bytes: int
    fallback: bool


@dataclass(frozen=True)
class Plan:
    """What a program would need and take on one device of a target. Nothing was measured.

    Attributes:
        step: what a step is: "training step", "repetition", "call" or "whole run".
        ended: why the script was not run to its end.
        seconds: of a step, predicted; `compiler_seconds` by the compiler's own total.
        utilisation: FLOPs of a step over its time and the device's peak in bfloat16.
        batch: samples and tokens of a step; 0 where unknown.
        advice: sentences that follow from the figures.
        recompiled: programs of the step that earlier steps did not have.
        padding: bytes of padding at the peak, by what is padded.
        float32: seconds of a step's matrix products in float32, by line.
    """

    target: str
    device: str
    peak_flops: float
    bandwidth: float
    step: str
    steps: int
    ended: str
    fits: bool
    verdict: str
    memory: Memory
    flops: float
    bytes: float
    seconds: float
    compiler_seconds: float
    bound: str
    utilisation: float
    samples: int
    tokens: int
    programs: list[ProgramFigures]
    operations: list[Operation]
    waits: list[HostWait]
    recompiled: int
    compile_seconds: float
    padding: dict[str, int]
    float32: dict[str, float]
    advice: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        given = json.loads(text)
        memory = given["memory"]
        memory["held"] = [Held(**{**held, "shape": tuple(held["shape"])}) for held in memory["held"]]
        given["memory"] = Memory(**memory)
        given["programs"] = [ProgramFigures(**p) for p in given["programs"]]
        given["operations"] = [Operation(**o) for o in given["operations"]]
        given["waits"] = [HostWait(**w) for w in given["waits"]]
        for derived in ("tokens_per_second", "samples_per_second"):
            del given[derived]
        return cls(**given)

    def to_json(self) -> str:
        rates = {"tokens_per_second": self.tokens_per_second, "samples_per_second": self.samples_per_second}
        return json.dumps({**dataclasses.asdict(self), **rates}, indent=1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0
