"""Elementwise lowerings: PyTorch's type promotion around a formula written for one dtype.

PyTorch computes an elementwise operator in the dtype its operands promote to (float32 for float16 and bfloat16) and
rounds once at the end. The formula sees operands of that dtype only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, types
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import EXTRAS, Function, IsStructure, Spec, lower


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


# Programs without larger arrays should compile fast rather than run fast.
_ROUNDED_FROM = 2**13


def _rounded(x: Array) -> Array:
    """float32 as bfloat16, in a form of which XLA:CPU makes vector code: gelu takes half the time."""
    if module.target().platform != "cpu" or x.dtype is not torch.float32 or x.size < _ROUNDED_FROM:
        return x
    bits = hlo.bitcast(x, torch.int32)
    is_odd = hlo.shift_right_logical(bits, 16) & 1
    nearest = hlo.shift_right_logical(bits + 0x7FFF + is_odd, 16)
    return hlo.bitcast(hlo.convert(hlo.select(hlo.is_nan(x), 0x7FC0, nearest), torch.int16), torch.bfloat16)


def elementwise(
    *names: str, static: Iterable[str] | Mapping[str, IsStructure] = (), by: str = "out"
) -> Callable[[Function], Function]:
    """Registers a formula whose operands are all converted to the dtype PyTorch computes in.

    Args:
        by: where that dtype comes from: "out", the result's dtype, for most operators; "common", the operands' promoted
            dtype itself, for those that compare or take bits apart and so must see the values as they are.
    """

    def register(function: Function) -> Function:
        wanted = [name for name in EXTRAS if name in inspect.signature(function).parameters]

        @functools.wraps(function)
        def lowering(*args: Any, out: Spec, common: torch.dtype, **kwargs: Any) -> Array:
            dtype = compute_dtype(out.dtype) if by == "out" else common
            given = {"out": out, "common": common}
            operands = {name: cast(value, dtype) for name, value in kwargs.items()}
            extras = {name: given[name] for name in wanted if name in given}
            result = function(*(cast(a, dtype) for a in args), **operands, **extras)
            return _rounded(result) if out.dtype is torch.bfloat16 else result

        # What the registry asks for: the formula's extras and the two used here.
        lowering.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in {*wanted, "out", "common"}]
        )
        lower(*names, static=static)(lowering)
        return function

    return register
