"""Kernels written by hand, by the name of the overload they serve, and the libraries that PyTorch knows kernels by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

HANDWRITTEN: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Function], Function]:
    """Makes a function the device's kernel for these overloads of `aten`."""

    def register(function: Function) -> Function:
        for name in names:
            if name in HANDWRITTEN:
                raise ValueError(f"{name} has two kernels: {HANDWRITTEN[name]} and {function}")
            packet, _, overload = name.partition(".")
            try:
                torch._C._dispatch_find_schema_or_throw(f"aten::{packet}", overload)
            except RuntimeError:
                raise ValueError(
                    f"PyTorch {torch.__version__} has no operator aten::{name}, of which {function} is the kernel"
                ) from None
            HANDWRITTEN[name] = function
        return function

    return register


_libraries: dict[str, torch.library.Library] = {}


def library(namespace: str) -> torch.library.Library:
    """Where kernels for the operators of a namespace are registered."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]
