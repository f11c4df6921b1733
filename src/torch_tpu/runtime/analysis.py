"""What the TPU compiler says of a program it has compiled: memory, cost, and the optimised HLO."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from dataclasses import dataclass
from typing import Any

from torch_tpu.runtime import compat, optimised_hlo


@dataclass(frozen=True)
class Analysis:
    """One program, compiled for one device. Byte counts are of device memory as laid out, padding included.

    Attributes:
        argument_bytes, output_bytes: What it takes and returns.
        alias_bytes: The part of the output that lies in the memory of arguments given up to it.
        temporary_bytes: Scratch memory while it runs.
        code_bytes: The program itself, which also lies in device memory.
        peak_bytes: The most it occupies at one time, arguments and outputs included.
        flops: Floating-point operations; not a number, like the two below, where a plug-in does not say.
        bytes_accessed: Bytes moved between memory and the processor.
        seconds: How long it runs, by the compiler's own cost model, which counts -1 for each operation it does not
            know, and the body of a loop once; nothing was measured.
        compile_seconds: How long compiling took.
        hlo: The optimised module as text; empty where it can't be read.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    peak_bytes: int
    flops: float
    bytes_accessed: float
    seconds: float
    compile_seconds: float
    hlo: str

    def to_bytes(self) -> bytes:
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Analysis:
        """Raises ValueError, TypeError or zlib.error where `data` is not what `to_bytes` wrote."""
        return cls(**json.loads(zlib.decompress(data)))


def analyse(compiled: Any, name: str, compile_seconds: float) -> Analysis:
    """Asks jaxlib's compiled program of a module of this name."""
    memory = compiled.get_compiled_memory_stats()
    try:
        cost = compiled.cost_analysis()
    except compat.xla.JaxRuntimeError:  # a plug-in need not estimate
        cost = dict.fromkeys(("flops", "bytes accessed", "optimal_seconds"), math.nan)
    return Analysis(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        seconds=cost.get("optimal_seconds", 0.0),
        compile_seconds=compile_seconds,
        hlo=optimised_hlo.text(compiled, name),
    )
