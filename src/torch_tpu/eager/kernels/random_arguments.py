"""Argument checks of `randperm`, dropout, rrelu and operators that fill, whose numbers are data no program looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.dispatch.out_form import raise_as_cpu
from torch_tpu.eager.kernel_table import kernel

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
    run = as_program(func)

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
    aten.uniform.default,
    aten.normal_functional.default,
    aten.normal.Tensor_float,
    aten.log_normal.default,
    aten.exponential.default,
    aten.cauchy.default,
    aten.geometric.default,
    aten.bernoulli.p,
    aten.random.default,
    aten.random.to,
    getattr(aten.random, "from"),
):
    _name = _func._schema.name.partition("::")[2]
    _overload = _func._schema.overload_name
    kernel(f"{_name}.{_overload}" if _overload else _name)(_checked(_func))


@kernel("randperm", "randperm.generator")
def randperm(n: int, *, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    _check_permutation(n, options.get("dtype") or torch.int64)
    if generator is None:
        result: torch.Tensor = as_program(aten.randperm.default)(n, **options)
    else:
        result = as_program(aten.randperm.generator)(n, generator=generator, **options)
    return result


@lru_cache(maxsize=64)
def _check_permutation(n: int, dtype: torch.dtype) -> None:
    """Raises what the CPU raises: for some dtypes, and where a dtype doesn't have all numbers below n."""
    if dtype.is_floating_point:
        last = int(2 / torch.finfo(dtype).eps)
    else:
        last = 0 if dtype is torch.bool or dtype.is_complex else torch.iinfo(dtype).max
    torch.randperm(n if n > last else min(n, 1), dtype=dtype, generator=_spare())


@kernel("native_dropout")
def native_dropout(x: torch.Tensor, p: float, train: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is not False and not 0 <= p <= 1:
        _check(aten.bernoulli_.float, torch.float32, (1 - p,))
    result: tuple[torch.Tensor, torch.Tensor] = as_program(aten.native_dropout.default)(x, p, train)
    return result


def _checked_slopes(func: OpOverload) -> Callable[..., Any]:
    run = as_program(func)

    def kernel(
        x: torch.Tensor, noise: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3, *rest: Any, **options: Any
    ) -> Any:
        if not 0 <= upper - lower <= torch.finfo(torch.float32).max:
            raise_as_cpu(func, (x, noise, lower, upper, *rest), options)
        return run(x, noise, lower, upper, *rest, **options)

    return kernel


for _func in (
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_.default,
    aten.rrelu_with_noise_functional.default,
):
    kernel(_func._schema.name.partition("::")[2])(_checked_slopes(_func))
