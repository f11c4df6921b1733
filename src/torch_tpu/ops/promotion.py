"""Elementwise lowerings: PyTorch's type promotion around a formula written for one dtype.

PyTorch computes an elementwise operator in the dtype its operands promote to (float32 for float16 and bfloat16) and
rounds once at the end. The formula sees operands of that dtype only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import types
from torch_tpu.hlo.array import Array
from torch_tpu.ops.registry import Function, Spec, lower


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which PyTorch computes results of `dtype`."""
    return types.COMPUTE.get(dtype, dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arrays (also inside lists) as `dtype`; anything else as it is."""
    if isinstance(value, Array):
        return hlo.convert(value, dtype)
    if isinstance(value, list):
        return [cast(v, dtype) for v in value]
    return value


def elementwise(*names: str, static: Iterable[str] = (), by: str = "out") -> Callable[[Function], Function]:
    """Registers a formula whose operands are all converted to the dtype PyTorch computes in.

    Args:
        by: where that dtype comes from: "out", the result's dtype, for most operators; "common", the operands' promoted
            dtype, for those whose result has another one (comparisons, `isnan`, `abs` of complex).
    """

    def register(function: Function) -> Function:
        wanted = [name for name in ("out", "common") if name in inspect.signature(function).parameters]

        @functools.wraps(function)
        def lowering(*args: Any, out: Spec, common: torch.dtype, **kwargs: Any) -> Array:
            dtype = compute_dtype(out.dtype if by == "out" else common)
            extras = {"out": out, "common": common}
            operands = {name: cast(value, dtype) for name, value in kwargs.items()}
            return function(*(cast(a, dtype) for a in args), **operands, **{name: extras[name] for name in wanted})

        # `wraps` makes inspect see the formula's own parameters; the registry must see the extras added here.
        del lowering.__wrapped__
        lower(*names, static=static)(lowering)
        return function

    return register
