"""Dtypes for which PyTorch's CPU kernel of an operator refuses what the lowering would compute.

Where the tracer finds one, the call fails, and the user gets the CPU's error instead of a number that nobody promises.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.hlo.types import type_name

_BOOL = frozenset(
    {
        "abs",
        "addcmul",
        "argmax",
        "argmin",
        "ceil",
        "floor",
        "kthvalue",
        "median",
        "median.dim",
        "nanmedian",
        "nanmedian.dim",
        "pow.Tensor_Tensor",
        "relu",
        "round",
        "topk",
        "trace",
        "trunc",
    }
)
_INTEGERS_AND_BOOL = frozenset({"hardsigmoid", "hardswish", "histc", "lerp.Scalar", "lerp.Tensor"})


def check_dtype(name: str, values: list[Any]) -> None:
    """Raises RuntimeError if an operator's CPU kernel refuses the dtypes of its tensors."""
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    if (name in _BOOL and dtypes == {torch.bool}) or (name in _INTEGERS_AND_BOOL and not any(map(_is_inexact, dtypes))):
        raise RuntimeError(f"{name} is not implemented for {', '.join(map(type_name, dtypes))}")


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
