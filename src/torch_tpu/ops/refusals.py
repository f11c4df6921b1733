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
_INTEGERS_AND_BOOL = frozenset({"addcdiv", "frac", "hardsigmoid", "hardswish", "histc", "lerp.Scalar", "lerp.Tensor"})
# A tensor without dimensions is returned without a look at what it holds.
_NUMBER_AS_IT_IS = frozenset({"kthvalue"})

# Others are refused where a lowering asks for the order of complex numbers, which have none.
_COMPLEX = frozenset({"gcd", "hypot", "i0", "logit", "special_i0"})


def check_dtype(name: str, values: list[Any]) -> None:
    """Raises RuntimeError if an operator's CPU kernel refuses the dtypes of its tensors."""
    if name in _NUMBER_AS_IT_IS and not values[0].dim():
        return
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    if name in _COMPLEX and any(d.is_complex for d in dtypes):
        raise RuntimeError(f"{name} is not implemented for complex numbers")
    if (name in _BOOL and dtypes == {torch.bool}) or (name in _INTEGERS_AND_BOOL and not any(map(_is_inexact, dtypes))):
        raise RuntimeError(f"{name} is not implemented for {', '.join(map(type_name, dtypes))}")


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
