"""Argument checks of the in-place random operators, whose numbers are data that no program looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.kernels import kernel, program

aten = torch.ops.aten


@lru_cache(maxsize=1024)
def _check(func: OpOverload, dtype: torch.dtype, arguments: tuple[Any, ...]) -> None:
    """Raises what the CPU's kernel raises for these arguments: it checks them on a tensor of one element."""
    func(torch.zeros(1, dtype=dtype), *arguments, generator=_spare())


@lru_cache(maxsize=1)
def _spare() -> torch.Generator:
    """A generator nobody else sees."""
    return torch.Generator()


def _checked(func: OpOverload) -> Callable[..., torch.Tensor]:
    run = program(func)

    def kernel(t: torch.Tensor, *arguments: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        _check(func, t.dtype, arguments)
        return run(t, *arguments, generator=generator)

    return kernel


for _func in (
    aten.uniform_.default,
    aten.normal_.default,
    aten.log_normal_.default,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.geometric_.default,
    aten.bernoulli_.float,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
):
    _name = _func._schema.name.partition("::")[2]
    _overload = _func._schema.overload_name
    kernel(f"{_name}.{_overload}" if _overload else _name)(_checked(_func))
