"""Keeps the executables of a plan, so that a machine with the target's TPUs starts without compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch_tpu.planner import compiling
from torch_tpu.runtime.disk_cache import DiskCache
from torch_tpu.runtime.topology import AheadOfTimeProgram, TopologyClient


def save(
    folder: Path, programs: Iterable[AheadOfTimeProgram], client: TopologyClient, progress: Callable[[int, int], None]
) -> int:
    """Writes the executable of each program to a folder in the format of the disk cache; returns how many.

    A process with `TORCH_TPU_CACHE_DIR` set to that folder finds them under the names it looks for. What the compiler
    refuses is left out.
    """
    kept = DiskCache(folder)
    own = client.disk_cache
    client.disk_cache = client.disk_cache or kept
    unique = list({p.key: p for p in programs}.values())
    try:
        answers = compiling.analyse(unique, progress)
    finally:
        client.disk_cache = own
    count = 0
    for program in unique:
        if not isinstance(answers[program], compiling.Refusal):
            executable = (own or kept).read(program.key)
            if executable is not None:
                count += kept.write(program.key, executable)
    return count
