"""Variances and deviations of too few elements: the CPU warns of them in each call, which a program can't."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.metrics.user_warnings import warn

aten = torch.ops.aten


def _warning(func: OpOverload) -> Callable[..., Any]:
    run = as_program(func)
    name = func._schema.name.partition("::")[2]

    def kernel(x: torch.Tensor, dim: Sequence[int] | None = None, **options: Any) -> Any:
        result = run(x, dim, **options)
        correction = options.get("correction")
        if _count(x, dim) <= (1 if correction is None else correction):
            warn(
                f"{name}(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor "
                "(input numel divided by output numel)."
            )
        return result

    return kernel


def _count(x: torch.Tensor, dim: Sequence[int] | None) -> int:
    """How many elements make one of the result; 0 where that has none."""
    if not dim or not x.dim():
        return x.numel()
    reduced = {d % x.dim() for d in dim}
    kept = math.prod(size for d, size in enumerate(x.shape) if d not in reduced)
    return x.numel() // kept if kept else 0


for _func in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction):
    kernel(_func.name().partition("::")[2])(_warning(_func))
