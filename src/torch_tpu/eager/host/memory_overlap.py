"""Writes to memory that another argument reads are refused as on the CPU.

Values never change here, so each such write would have a meaning; but programs are to behave alike on both devices.
Each operator of the CPU refuses the overlap of some arguments with what it writes: any, or only that of a part. What it
does is tried once for each way in which a call's arguments overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.hlo.strided import is_dense
from torch_tpu.ops.core.argument_mapper import cpu_error_with, tensors
from torch_tpu.ops.core.schema import bind, signature
from torch_tpu.recent import Recent
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.transfer import host_view

# The CPU's words, or None where it allows it, by operator and overlaps.
_verdicts: Recent[Any, Any] = Recent(4096)

_OF_ONE = "unsupported operation: more than one element of the written-to tensor"


def check_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU raises where a written tensor and another argument share memory."""
    values = bind(func, args, kwargs)
    given = [(i, k, t) for i, value in enumerate(values) for k, t in enumerate(tensors(value))]
    written = [i for i, a in enumerate(signature(func).arguments) if a.is_written]
    found = {
        (i, j, k == m, overlap)
        for i, k, target in given
        if i in written
        for j, m, other in given
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
    """What the CPU raises for a call on tensors that lie in memory as the device's do.

    Args:
        contents: with those of the device; else zeros.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        if not t.is_tpu:  # type: ignore[attr-defined]
            return t
        storage = t.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        found = torch.empty(0, dtype=t.dtype).set_(storages[id(storage)], int(t.storage_offset()), t.shape, t.stride())
        return found.copy_(host_view(t)) if contents else found

    return cpu_error_with(func, args, kwargs, stand_in)


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
