"""How much memory there is: of this machine, and for values of a platform."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from torch_tpu.runtime.generations import BY_NAME
from torch_tpu.runtime.platform import Platform


def host_memory() -> tuple[int, int]:
    """Free and total bytes of this machine's memory."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Linux counts memory it holds as a file cache as available; elsewhere the number is not to be had.
    return _of_linux("MemAvailable") or total, total


def of_device(chosen: Platform, device_kind: str) -> float:
    """Bytes that no value on a device can exceed; infinity where that is not known, or programs don't run.

    Of a TPU that is its memory. Another platform may use the host's, and only says which TPU it passes for.
    """
    generation = chosen.stand_in or BY_NAME.get(device_kind)
    if chosen.topology is not None or generation is None:
        return math.inf
    own = generation.hbm_bytes_per_device
    return own if chosen.name == "tpu" else max(own, host_memory()[1] + _of_linux("SwapTotal"))


def _of_linux(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
