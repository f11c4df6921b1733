"""Kernels written by hand, by the name of the overload they serve; and the compiled form of any overload."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch._ops import OpOverload

from torch_tpu.ops.core import derived

Function = TypeVar("Function", bound=Callable[..., Any])

HANDWRITTEN: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Function], Function]:
    """Makes a function the device's kernel for these overloads of `aten`."""

    def register(function: Function) -> Function:
        for name in names:
            if name in HANDWRITTEN:
                raise ValueError(f"{name} has two kernels")
            HANDWRITTEN[name] = function
        return function

    return register


@cache
def program(func: OpOverload) -> Callable[..., Any]:
    """The kernel that runs an overload as a compiled program."""
    from torch_tpu.eager.dispatch.operator import ListOperator, Operator

    is_list = derived.is_entrywise(func) or derived.writes_lists(func)
    return ListOperator(func) if is_list else Operator(func)
