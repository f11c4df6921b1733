"""Why a TPU does not start, and what to do about it: from what its runtime says and from its device files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

DEVICE_FOLDER = Path("/dev")
PROCESSES = Path("/proc")

# What is found in an error of libtpu or jaxlib (PJRT), and what to do. The first that matches counts.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"already in use|lockfile|resource busy",
        "another process holds the TPU, and a TPU serves one process at a time. End that process, or give each its own "
        "chips with TPU_VISIBLE_CHIPS (and TPU_PROCESS_BOUNDS, TPU_CHIPS_PER_PROCESS_BOUNDS). If there is no such "
        "process, a killed one has left its lock file: `sudo rm /tmp/libtpu_lockfile`.",
    ),
    (
        r"permission denied|operation not permitted|EACCES|EPERM",
        "this user may not open the TPU's device files (/dev/accel*, /dev/vfio/*): run as root, join the group that "
        "owns them, or start the container with `--privileged` or `--device` for each of them.",
    ),
    (
        r"GetPjrtApi not found|file too short|invalid ELF|wrong ELF class|cannot open shared object",
        "the library is not a PJRT plugin for this machine: correct TORCH_TPU_PLATFORM or TPU_LIBRARY_PATH, or "
        "`pip install --force-reinstall libtpu`.",
    ),
    (
        r"PJRT[ _]?(?:C[ _])?API.*version|version.*PJRT|API version|struct_size|mismatched? version",
        "libtpu and jaxlib don't speak the same version of PJRT: `pip install -U libtpu jaxlib`, or the versions in "
        "torch-tpu's constraints.txt.",
    ),
    (
        r"no jellyfish device|no tpu|not find tpu|no devices? found|NOT_FOUND: TPU initialization failed",
        "libtpu sees no TPU chip: use a Cloud TPU machine (in a container, with its devices passed through), or "
        "TORCH_TPU_PLATFORM=cpu to run on XLA:CPU, or a topology such as TORCH_TPU_PLATFORM=v5e:2x2 to compile only.",
    ),
    (
        r"metadata|TPU_WORKER|worker.?id|slice.?builder|TPU_PROCESS_ADDRESSES|DEADLINE_EXCEEDED",
        "the hosts of a slice did not find each other: every host must run the program, with TPU_WORKER_ID, "
        "TPU_WORKER_HOSTNAMES and TPU_PROCESS_BOUNDS as the machine's image sets them; for this host alone set "
        "TPU_PROCESS_BOUNDS=1,1,1 and TPU_VISIBLE_CHIPS.",
    ),
)


def advice(said: str) -> str:
    """What to do about an error of the TPU's runtime; empty where it is not known."""
    return next((what for pattern, what in _CAUSES if re.search(pattern, said, re.IGNORECASE)), "")


def device_files(folder: Path = DEVICE_FOLDER) -> list[Path]:
    """The files through which a process reaches TPU chips."""
    vfio = [f for f in sorted(folder.glob("vfio/*")) if f.name.isdigit()]
    return [*sorted(folder.glob("accel[0-9]*")), *sorted(folder.glob("accel/accel[0-9]*")), *vfio]


def forbidden(files: list[Path]) -> list[Path]:
    """Those that this user may not open."""
    return [file for file in files if not os.access(file, os.R_OK | os.W_OK)]


def holders(files: list[Path], processes: Path = PROCESSES) -> dict[int, str]:
    """The other processes that have one of the files open, as far as this user may know: number and name."""
    wanted = {str(file) for file in files}
    found = {}
    for number, link in _open_files(processes):
        if number != os.getpid() and link in wanted:
            with contextlib.suppress(OSError):
                found[number] = (processes / str(number) / "comm").read_text().strip()
    return found


def _open_files(processes: Path) -> Iterator[tuple[int, str]]:
    for process in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield int(process.name), os.readlink(descriptor)
