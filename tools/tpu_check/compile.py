"""Compiles programs for ahead-of-time targets (no TPU attached), many as one, which takes a third of the time."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from tools.conformance import pool
from torch_tpu.hlo import module
from torch_tpu.runtime import platform
from torch_tpu.runtime.client import client_errors
from torch_tpu.runtime.topology import TopologyClient

TARGETS = ("v5e:1x1", "tpu7x:1x1x1")
# With more, each takes as long, and more have to be compiled again when one fails.
PROGRAMS_AT_ONCE = 32
# What a batch, and one program, may take of a processor's time. A usual program takes 10 ms in a batch, alone 34 ms.
SECONDS_AT_ONCE = 60
SECONDS_ALONE = 300
# Parts that a failed batch is cut into. More than two, because one that takes too long takes as long in each round.
PARTS = 8


class Batch(NamedTuple):
    """Programs to compile as one for a target."""

    target: str
    digests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.digests)} programs for {self.target}"


class Verdict(NamedTuple):
    """What the compiler says of a program; an empty reason means that it compiles.

    Attributes:
        seconds: the processor's time it takes, where it was compiled alone.
    """

    digest: str
    target: str
    reason: str
    seconds: float = 0.0


def verdicts(batches: Iterable[Batch], folder: Path, log: Path, workers: int) -> Iterator[list[Verdict]]:
    """What the compiler says of each program, batch by batch. One that fails is cut until the guilty are found."""
    waiting = list(batches)
    job = pool.Job(log, Compile(folder))
    while waiting:
        failed = []
        for batch, outcome in pool.run(waiting, job, workers=workers):
            reason = outcome.get("reason") or "".join(f["message"] for f in outcome.get("failures", ()))
            if reason and len(batch.digests) > 1:
                failed.append(batch)
            elif len(batch.digests) > 1:
                yield [Verdict(digest, batch.target, "") for digest in batch.digests]
            else:
                if reason.endswith(f"code -{signal.SIGXCPU.value}"):
                    reason = f"compiling it takes more than {SECONDS_ALONE} s of a processor's time"
                yield [Verdict(batch.digests[0], batch.target, reason, outcome.get("processor", 0.0))]
        waiting = [part for batch in failed for part in _parts(batch)]


def batches(digests: Mapping[str, Iterable[str]]) -> list[Batch]:
    """The digests of each target as batches."""
    found = []
    for target, wanted in digests.items():
        ordered = tuple(wanted)
        found += [Batch(target, ordered[i : i + PROGRAMS_AT_ONCE]) for i in range(0, len(ordered), PROGRAMS_AT_ONCE)]
    return found


def _parts(batch: Batch) -> list[Batch]:
    size = -(-len(batch.digests) // PARTS)
    return [Batch(batch.target, batch.digests[i : i + size]) for i in range(0, len(batch.digests), size)]


class Compile:
    """Compiles batches of programs that are files of `folder`. One that takes too long ends the process (SIGXCPU)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """{"reason": why the compiler refuses the batch, else "", "processor": the seconds it took of its time}"""
        client = _client(batch.target)
        began = time.process_time()
        most = began + (SECONDS_AT_ONCE if len(batch.digests) > 1 else SECONDS_ALONE)
        resource.setrlimit(resource.RLIMIT_CPU, (int(most), resource.getrlimit(resource.RLIMIT_CPU)[1]))
        reason = ""
        try:
            joined = join([(self.folder / digest).read_bytes() for digest in batch.digests])
            client.compile(joined, []).analysis()
        except (client_errors(), ir.MLIRError) as error:
            reason = str(error)
        return {"reason": reason, "processor": round(time.process_time() - began, 1)}


@cache
def _client(target: str) -> TopologyClient:
    os.environ["TORCH_TPU_CACHE_DIR"] = ""
    return TopologyClient(platform.choose({**os.environ, "TORCH_TPU_PLATFORM": target}))


def join(programs: Iterable[bytes]) -> ir.Module:
    """One module that takes the parameters of all programs (MLIR bytecode) and returns the results of all."""
    with module.building, module.context(), ir.Location.unknown():
        joined = ir.Module.create()
        joined.operation.attributes["sym_name"] = ir.StringAttr.get("joined")
        parameters: list[ir.Type] = []
        results: list[ir.Type] = []
        functions = []
        for n, code in enumerate(programs):
            # The module has to outlive the copy that is made of it.
            program = ir.Module.parse(code)
            function = module.main(program)
            copy = function.operation.clone(ir.InsertionPoint(joined.body))
            copy.attributes["sym_name"] = ir.StringAttr.get(f"f{n}")
            copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
            functions.append(function.type)
            parameters += function.type.inputs
            results += function.type.results
        with ir.InsertionPoint(joined.body):
            main: Any = func.FuncOp("main", (parameters, results))
            main.attributes["sym_visibility"] = ir.StringAttr.get("public")
            block = main.add_entry_block()
        with ir.InsertionPoint(block):
            given = iter(block.arguments)
            returned: list[Any] = []
            for n, kind in enumerate(functions):
                operands = [next(given) for _ in kind.inputs]
                returned += func.CallOp(kind.results, ir.FlatSymbolRefAttr.get(f"f{n}"), operands).results
            func.return_(returned)
        return joined
