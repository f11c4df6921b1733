"""Kernels written by hand, by the name of the overload they serve; and the compiled form of any overload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload

from torch_tpu.eager import overload_table

Function = TypeVar("Function", bound=Callable[..., Any])

HANDWRITTEN: dict[str, Callable[..., Any]] = {}
_programs: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Function], Function]:
    """Makes a function the device's kernel for these overloads of `aten`."""

    def register(function: Function) -> Function:
        for name in names:
            if name in HANDWRITTEN:
                raise ValueError(f"{name} has two kernels")
            HANDWRITTEN[name] = function
        return function

    return register


def program(func: OpOverload) -> Callable[..., Any]:
    """The kernel that runs an overload as a compiled program."""
    name = func.name()
    return _programs.get(name) or program_named(
        name, overload_table.rows().get(name) or overload_table.row_of(name, func)
    )


def program_named(name: str, row: overload_table.Row) -> Callable[..., Any]:
    """The same, by the overload's name; the overload itself is looked at when the kernel is first called."""
    from torch_tpu.eager.dispatch.operator import new_operator

    found = _programs.get(name)
    return _programs.setdefault(name, new_operator(name, row)) if found is None else found
