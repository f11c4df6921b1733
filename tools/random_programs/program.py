"""A program: a list of source lines over the tensors t0, t1, …, and the script that shows it to a reader."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

NAME = re.compile(r"\bt\d+\b")
Namespace = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One line.

    Attributes:
        source: a Python statement that may name `torch`, `device`, `inf`, `nan` and the tensors made before.
        kind: the name of the function that drew it.
        raises: the exception's type where the CPU refuses the line. It then changes nothing.
    """

    source: str
    kind: str
    raises: str | None = None


@dataclass(frozen=True)
class Program:
    seed: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(step.source for step in self.steps)


def namespace(device: str) -> Namespace:
    """What a program's lines see before the first one."""
    return {"torch": torch, "device": torch.device(device), "inf": math.inf, "nan": math.nan}


@lru_cache(maxsize=4096)
def _code(source: str) -> CodeType:
    return compile(source, "<step>", "exec")


def execute(source: str, names: Namespace) -> Exception | None:
    """Runs one line; what it raises is returned without its traceback, which would keep tensors alive."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(_code(source), names)
    except Exception as error:
        return error.with_traceback(None)
    return None


def tensors(names: Namespace) -> dict[str, torch.Tensor]:
    """The live tensors by name, gradients as `t3.grad`."""
    found = {}
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
            if (value.is_leaf or value.retains_grad) and value.grad is not None:
                found[f"{name}.grad"] = value.grad
    return found


def script(steps: Sequence[Step]) -> str:
    """A self-contained script that runs the lines on both devices and prints the tensors that differ."""
    lines = [
        "import torch",
        "import torch_tpu",
        "from math import inf, nan",
        "",
        "",
        "def program(device):",
    ]
    for step in steps:
        if step.raises is None:
            lines.append(f"    {step.source}")
        else:
            lines += ["    try:", f"        {step.source}", f"    except {step.raises}:", "        pass"]
    lines += [
        "    return {name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}",
        "",
        "",
        'cpu, tpu = program("cpu"), program("tpu")',
        "for name, want in cpu.items():",
        "    pairs = [(tpu[name], want)] + [(tpu[name].grad, want.grad)] * want.is_leaf",
        "    for got, want in pairs:",
        "        if want is not None:",
        "            print(name, tuple(got.shape), got.stride(), got.dtype, got.cpu(), want, sep='\\n')",
    ]
    return "\n".join(lines)
