"""Dtypes and dimensions for which PyTorch's CPU kernel of an operator refuses what the lowering would compute.

Where the tracer finds one, the call fails, and the user gets the CPU's error instead of a number that nobody promises.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from torch_tpu.hlo.types import type_name
from torch_tpu.ops.core.schema import Signature

_BOOL = frozenset(
    {
        "abs",
        "addcmul",
        "argmax",
        "argmin",
        "ceil",
        "convolution",
        "convolution_overrideable",
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
# The same if their numbers are bool too; with others the operands are promoted.
_BOOL_WITH_BOOL = frozenset({"clamp", "clamp_max", "clamp_min"})
_INTEGERS_AND_BOOL = frozenset(
    {
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "_logcumsumexp",
        "_softmax_backward_data",
        "addcdiv",
        "frac",
        "geqrf",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "igamma",
        "igammac",
        "lerp.Scalar",
        "lerp.Tensor",
        "logcumsumexp",
        "multi_margin_loss",
        "multilabel_margin_loss_forward",
        "round.decimals",
        "segment_reduce",
        "smooth_l1_loss",
    }
)
# A tensor without dimensions is returned without a look at what it holds.
_NUMBER_AS_IT_IS = frozenset({"kthvalue"})
# Others are refused where a lowering asks for the order of complex numbers, which have none.
_COMPLEX = frozenset({"gcd", "hypot", "i0", "logit", "segment_reduce", "special_i0"})
# Bytes can be images.
_ALL_BUT_BYTES = re.compile(r"_?upsample_(bilinear2d|bicubic2d|lanczos2d|linear1d|trilinear3d)(_aa)?$")


# Their dimension is one of another tensor than the first.
_OF_ANOTHER = re.compile(r"backward|jvp|_weight_norm")


def check_dimension(name: str, sig: Signature, values: list[Any]) -> None:
    """Raises IndexError if the argument `dim` is none of the first tensor's, which not every meta kernel does."""
    at = sig.positions.get("dim")
    if not at or type(values[at]) is not int or not isinstance(values[0], torch.Tensor) or _OF_ANOTHER.search(name):
        return
    rank = max(values[0].dim(), 1)
    if not -rank <= values[at] < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {values[at]})"
        )


def check_dtype(name: str, values: list[Any]) -> None:
    """Raises RuntimeError if an operator's CPU kernel refuses the dtypes of its tensors and numbers."""
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    if name in _NUMBER_AS_IT_IS and not values[0].dim():
        return
    if name in _COMPLEX and any(d.is_complex for d in dtypes):
        raise RuntimeError(f"{name} is not implemented for complex numbers")
    if any(d.is_floating_point or d.is_complex for d in dtypes):
        return
    if (
        (name in _BOOL and dtypes == {torch.bool})
        or (name in _BOOL_WITH_BOOL and dtypes == {torch.bool} and not any(type(v) in (int, float) for v in values))
        or name in _INTEGERS_AND_BOOL
        or (_ALL_BUT_BYTES.match(name) and dtypes != {torch.uint8})
    ):
        raise RuntimeError(f"{name} is not implemented for {', '.join(map(type_name, dtypes))}")
