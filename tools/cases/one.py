"""One program of a folder, in this process: `python -m tools.cases.one FILE DEVICE [BACKEND]`.

A program is a file with a function `case(device)`, which raises where something is wrong. With a backend that function
is compiled. The last line of the output says in JSON how it ended.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

import torch_tpu  # noqa: F401  registers the device where the package is not installed


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where torch.compile looks a function's globals up.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def message_of(error: BaseException, path: Path) -> str:
    """What the error says first (and Dynamo's explanation), and in which line of the program it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = said[1:2] if said and said[0].endswith(":") else [s for s in said if s.startswith("Explanation:")]
    text = " ".join([*said[:1], *reasons])
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {text}"


def run(path: Path, device: str, backend: str = "") -> str:
    """How the program fails, nothing where it passes."""
    try:
        case = load(path).case
        (torch.compile(case, backend=backend) if backend else case)(device)
    except Exception as error:
        traceback.print_exc()
        return message_of(error, path)
    return ""


if __name__ == "__main__":
    failure = run(Path(sys.argv[1]), *sys.argv[2:])
    sys.stdout.write("\n" + json.dumps({"failure": failure}) + "\n")
    sys.stdout.flush()
