"""Judges the numbers of a call, which are data: a program that is known has been judged by other numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ops.tracing.cpu_acceptance import check_numbers, described, has_domain
from torch_tpu.recent import Recent

_FLOAT32 = torch.finfo(torch.float32).max
_INFINITE = (math.inf, -math.inf)
# What the CPU raises, _ACCEPTED if it does not, by operator, dtypes and all that is no tensor.
_verdicts: Recent[Any, Any] = Recent(4096)
_ACCEPTED = object()


@lru_cache(maxsize=256)
def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Numbers no CPU kernel refuses."""
    if dtype.is_floating_point or dtype.is_complex:
        return -_FLOAT32, _FLOAT32
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def judge(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor], numbers: list[Any]
) -> None:
    """Raises what the CPU raises for the numbers of a call.

    Args:
        tensors, numbers: those of the arguments.
    """
    dtypes = tuple(dict.fromkeys([t.dtype for t in tensors]))
    if not has_domain(func) and all(_surely_fits(n, dtypes) for n in numbers):
        return
    key = (func, repr(described([args, kwargs])))
    verdict = _verdicts.find(key)
    if verdict is None:
        verdict = _verdicts.keep(key, check_numbers(func, args, kwargs) or _ACCEPTED)
    if verdict is not _ACCEPTED:
        raise type(verdict)(*verdict.args)


def _surely_fits(number: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    if isinstance(number, complex):
        return all(d.is_complex for d in dtypes)
    if number in _INFINITE:
        return all(d.is_floating_point for d in dtypes)
    return all(low <= number <= high for low, high in map(_range, dtypes))
