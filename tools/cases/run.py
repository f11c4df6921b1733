"""Runs one program in a process of its own, in one of three modes; asks CPU PyTorch about what can't be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.cases.results import Result, digest_of

# What each mode adds to the environment, and the backend it compiles with.
MODES = {"strict": ({}, ""), "fused": ({"TORCH_TPU_DEFER_AND_FUSE": "1"}, ""), "compiled": ({}, "tpu")}
# PyTorch's own backend that runs a captured graph as it is: what it refuses, no backend can compile.
REFERENCE = ("cpu", "aot_eager")


def run(program: Path, mode: str, timeout: float) -> Result:
    added, backend = MODES[mode]
    start = time.monotonic()
    failure = _failure(program, "tpu", backend, added, timeout)
    refusal = _failure(program, *REFERENCE, {}, timeout) if failure and backend else ""
    return Result(program.stem, digest_of(program), failure, refusal, round(time.monotonic() - start, 1))


def _failure(program: Path, device: str, backend: str, added: dict[str, str], timeout: float) -> str:
    """How the program fails; empty where it passes."""
    command = [sys.executable, "-m", "tools.cases.one", str(program), device, backend]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, env=os.environ | added)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return f"no end within {timeout:.0f} s"
        last = _last_line(out)
        if code == 0 and last.startswith("{"):
            return str(json.loads(last)["failure"])
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return f"{how}: {_last_line(errors)}"


def _last_line(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return (file.read().decode(errors="replace").strip().splitlines() or [""])[-1]
