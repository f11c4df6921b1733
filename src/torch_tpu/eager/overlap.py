"""Writes to memory that another argument reads in a different place are refused as on the CPU.

Values never change here, so each such write would have a meaning; but programs are to behave alike on both devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.hlo.strided import is_dense
from torch_tpu.ops.schema import bind, call, signature


def check_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU raises where a written tensor and another one share a part of their memory."""
    values = bind(func, args, kwargs)
    written = [v for a, v in zip(signature(func).arguments, values, strict=True) if a.is_written]
    everything = list(_tensors(values))
    if not any(_part(w, t) for w in _tensors(written) for t in everything):
        return
    stand_ins: dict[int, torch.UntypedStorage] = {}
    call(func, _stand_in(args, stand_ins), {k: _stand_in(v, stand_ins) for k, v in kwargs.items()})


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _part(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors overlap without being the same; of those with gaps PyTorch doesn't ask."""
    if a is b or not a.is_tpu or not b.is_tpu or a.untyped_storage() is not b.untyped_storage():  # type: ignore[attr-defined]
        return False
    if not (a.numel() and b.numel() and is_dense(a.shape, a.stride()) and is_dense(b.shape, b.stride())):
        return False
    (a_begin, a_end), (b_begin, b_end) = _range(a), _range(b)
    if (a_begin, a_end) == (b_begin, b_end):
        return a.stride() != b.stride()
    return a_begin < b_end and b_begin < a_end


def _range(t: torch.Tensor) -> tuple[int, int]:
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + t.numel() * t.element_size()


def _stand_in(value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    """Zeros on the CPU that lie in memory as the device's tensors do."""
    if isinstance(value, torch.Tensor):
        if not value.is_tpu:  # type: ignore[attr-defined]
            return value
        storage = value.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        place = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype).set_(storages[id(storage)], *place)
    if isinstance(value, (list, tuple)):
        return type(value)([_stand_in(v, storages) for v in value])
    return value
