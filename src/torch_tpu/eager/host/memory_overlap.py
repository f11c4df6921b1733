"""Writes to memory that another argument reads are refused as on the CPU.

Values never change here, so each such write would have a meaning; but programs are to behave alike on both devices.
Each operator of the CPU refuses the overlap of some arguments with what it writes: any, or only that of a part. What it
does is tried once for each way in which a call's arguments overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.hlo.strided import is_dense
from torch_tpu.ops.core.schema import bind, call, signature
from torch_tpu.recent import Recent
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.transfer import host_view

# The CPU's words, or None where it allows it, by operator and overlaps.
_verdicts: Recent[Any, Any] = Recent(4096)

_OF_ONE = "unsupported operation: more than one element of the written-to tensor"


def check_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU raises where a written tensor and another argument share memory."""
    values = bind(func, args, kwargs)
    tensors = [(i, k, t) for i, value in enumerate(values) for k, t in enumerate(_tensors(value))]
    written = [i for i, a in enumerate(signature(func).arguments) if a.is_written]
    found = {
        (i, j, k == m, overlap)
        for i, k, target in tensors
        if i in written
        for j, m, other in tensors
        if (i, k) != (j, m) and (overlap := _overlap(target, other))
    }
    if not found:
        return
    key = (func, frozenset(found))
    verdict = _verdicts.find(key)
    if verdict is None:
        verdict = _tried(func, args, kwargs)
        if verdict is None:
            return
        _verdicts.keep(key, verdict)
    if verdict:
        # The CPU may have something else to say first: of an index out of bounds.
        raise (client().runs and _error(func, args, kwargs, contents=True)) or RuntimeError(verdict)


def _tried(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The words with which the CPU refuses the overlap, "" if it does not; None where something else is wrong."""
    error = _error(func, args, kwargs)
    if error is None:
        return ""
    words = str(error)
    # Those about elements of one tensor are no verdict on two.
    of_two = words.startswith("unsupported operation:") and not words.startswith(_OF_ONE)
    return words if of_two else None


def _error(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, contents: bool = False
) -> Exception | None:
    """What the CPU raises for a call on tensors that lie in memory as the device's do."""
    stand_ins: dict[int, Any] = {}
    positional = _stand_in(args, stand_ins, contents)
    named = {k: _stand_in(v, stand_ins, contents) for k, v in kwargs.items() if k != "pin_memory"}
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            call(func, positional, named)
    except Exception as error:
        return error.with_traceback(None)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> str:
    """How two tensors overlap; of those with gaps PyTorch doesn't ask."""
    if a is b:
        return "all"
    if not a.is_tpu or not b.is_tpu or a.untyped_storage() is not b.untyped_storage():  # type: ignore[attr-defined]
        return ""
    if not (a.numel() and b.numel() and is_dense(a.shape, a.stride()) and is_dense(b.shape, b.stride())):
        return ""
    (a_begin, a_end), (b_begin, b_end) = _range(a), _range(b)
    if (a_begin, a_end) == (b_begin, b_end):
        return "all" if a.stride() == b.stride() else "part"
    return "part" if a_begin < b_end and b_begin < a_end else ""


def _range(t: torch.Tensor) -> tuple[int, int]:
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + t.numel() * t.element_size()


def _stand_in(value: Any, known: dict[int, Any], contents: bool) -> Any:
    """Tensors on the CPU that lie in memory as the device's do, zeros unless their `contents` are asked for."""
    if isinstance(value, torch.Tensor):
        if not value.is_tpu:  # type: ignore[attr-defined]
            return value
        if id(value) not in known:
            storage = value.untyped_storage()
            if id(storage) not in known:
                known[id(storage)] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            place = (value.storage_offset(), value.shape, value.stride())
            known[id(value)] = torch.empty(0, dtype=value.dtype).set_(known[id(storage)], *place)
            if contents:
                known[id(value)].copy_(host_view(value))
        return known[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)([_stand_in(v, known, contents) for v in value])
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch._C.Generator) else value
