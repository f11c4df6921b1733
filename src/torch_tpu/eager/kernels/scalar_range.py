"""Numbers that a tensor's dtype can't hold: the operators that write a number refuse them, as on the CPU.

The number is data that no program looks at, so the kernel looks before it runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.host.fallback import cpu_error
from torch_tpu.eager.kernel_table import kernel

aten = torch.ops.aten


@lru_cache(maxsize=64)
def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Numbers that surely fit."""
    if dtype.is_floating_point or dtype.is_complex:
        info = torch.finfo(dtype)
        return info.min, info.max
    if dtype is torch.bool:
        return float("-inf"), float("inf")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def check_fits(value: Any, dtype: torch.dtype) -> None:
    """Raises what the CPU raises where `dtype` can't hold a number; -1 is 255 for uint8, infinity is a float."""
    if isinstance(value, complex) or not (isinstance(value, torch.Tensor) or _fits(value, dtype)):
        torch.zeros(2, dtype=dtype).fill_(value)  # for one element alone, the CPU does not look


def _fits(value: int | float, dtype: torch.dtype) -> bool:
    low, high = _range(dtype)
    return low <= value <= high


def _checked(func: OpOverload, position: int) -> Callable[..., torch.Tensor]:
    run = as_program(func)

    def kernel(first: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if len(arguments) > position:
            value = arguments[position]
            dtype = options.get("dtype") or getattr(first, "dtype", None)
            if dtype is None and isinstance(value, (int, float)) and not isinstance(value, bool):
                dtype = torch.int64 if isinstance(value, int) else torch.get_default_dtype()
            if dtype is not None:
                check_fits(value, dtype)
            if dtype is torch.bool and isinstance(value, complex):
                if error := cpu_error(func, (first, *arguments), options):
                    raise error
                arguments = (*arguments[:position], bool(value), *arguments[position + 1 :])
        return run(first, *arguments, **options)

    return kernel


for _func, _position in (
    (aten.fill_.Scalar, 0),
    (aten.fill.Scalar, 0),
    (aten.full.default, 0),
    (aten.full_like.default, 0),
    (aten.new_full.default, 1),
    (aten.constant_pad_nd.default, 1),
    (aten.masked_fill.Scalar, 1),
    (aten.masked_fill_.Scalar, 1),
    (aten.index_fill.int_Scalar, 2),
    (aten.index_fill_.int_Scalar, 2),
    (aten.scatter.value, 2),
    (aten.scatter_.value, 2),
):
    kernel(_func.name().partition("::")[2])(_checked(_func, _position))


def _shifted(func: OpOverload) -> Callable[..., torch.Tensor]:
    """PyTorch's meta kernel knows no shift of a bool; by a number, it is one of an integer."""
    run = as_program(func)

    def kernel(x: torch.Tensor, amount: Any) -> torch.Tensor:
        return run(x.to(torch.result_type(x, amount)) if x.dtype is torch.bool else x, amount)

    return kernel


for _func in (aten.__lshift__.Scalar, aten.__rshift__.Scalar):
    kernel(_func.name().partition("::")[2])(_shifted(_func))


def _checked_bounds(func: OpOverload) -> Callable[..., torch.Tensor]:
    run = as_program(func)

    def kernel(x: torch.Tensor, *bounds: Any, **named: Any) -> torch.Tensor:
        if not x.dtype.is_floating_point:
            numbers = [v for v in (*bounds, *named.values()) if isinstance(v, int)]
            if not all(_fits(v, x.dtype) for v in numbers) and (error := cpu_error(func, (x, *bounds), named)):
                raise error
        return run(x, *bounds, **named)

    return kernel


for _func in (
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_max.default,
    aten.clamp_max_.default,
    aten.clamp_min.default,
    aten.clamp_min_.default,
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.threshold.default,
    aten.threshold_.default,
):
    kernel(_func.name().partition("::")[2])(_checked_bounds(_func))


@kernel("scalar_tensor")
def scalar_tensor(value: complex, **options: Any) -> torch.Tensor:
    check_fits(value, options.get("dtype") or torch.get_default_dtype())
    result: torch.Tensor = as_program(aten.scalar_tensor.default)(value, **options)
    return result
