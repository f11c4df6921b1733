"""What a program depends on, in words, so that a report can say how it differs from an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_tpu.eager.program.plan import Call, Input, Slot
from torch_tpu.hlo.strided import contiguous_strides


def fields(call: Call, names: Sequence[str]) -> dict[str, str]:
    """Everything in a call that another program would be made for, by argument.

    Args:
        names: of the positional arguments.
    """
    found = {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    named = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    by_input: list[str] = []
    for name, value in named:
        for field, text in _value(name, value, call, by_input):
            found[field] = text
    shared = [f"{by_input[spec.storage]} and {by_input[i]}" for i, spec in enumerate(call.inputs) if spec.storage != i]
    if shared:
        found["arguments that share memory"] = ", ".join(shared)
    return found


def _value(name: str, value: Any, call: Call, by_input: list[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, (list, tuple)):
        yield f"length of {name}", str(len(value))
        for i, item in enumerate(value):
            yield from _value(f"{name}[{i}]", item, call, by_input)
    elif not isinstance(value, Slot):
        yield name, str(value).removeprefix("torch.")
    elif value.kind == "input":
        by_input.append(name)
        yield from _tensor(name, call.inputs[value.index])
    elif value.kind == "data":
        yield f"type of {name}", type(call.data[value.index]).__name__
    else:
        yield f"dtype of {name}", f"{_dtype(call.hosts[value.index])} (a number on the CPU)"


def _tensor(name: str, spec: Input) -> Iterator[tuple[str, str]]:
    yield f"shape of {name}", str(list(spec.sizes))
    yield f"dtype of {name}", _dtype(spec.dtype)
    contiguous = spec.strides == contiguous_strides(spec.sizes)
    yield f"strides of {name}", "contiguous" if contiguous else str(list(spec.strides))
    g = spec.geometry
    if (g.sizes, g.strides, g.dtype) == (spec.sizes, spec.strides, spec.dtype) and not spec.starts:
        yield f"memory of {name}", "its own"
    else:
        slices = f", cut in {spec.starts} dimensions" if spec.starts else ""
        yield f"memory of {name}", f"a view of {_dtype(g.dtype)}{list(g.sizes)}{slices}"
    if spec.conj:
        yield f"conjugation of {name}", "lazy"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
