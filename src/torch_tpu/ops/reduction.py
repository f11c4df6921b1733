"""Sums, extremes, means and other reductions over dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.promotion import compute_dtype
from torch_tpu.ops.registry import Spec, lower


def reduced_dimensions(x: Array, dim: Sequence[int] | int | None) -> list[int]:
    """Non-negative dimensions; none given means all of them."""
    if dim is None or dim == []:
        return list(range(x.ndim))
    return sorted({d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)}) if x.ndim else []


@lower("sum.dim_IntList", "sum")
def sum_(
    x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None, out: Spec
) -> Array:
    wide = hlo.convert(x, compute_dtype(out.dtype))
    return hlo.reshape(structured.reduce_sum(wide, reduced_dimensions(x, dim)), out.shape)


@lower("mean.dim", "mean")
def mean(
    x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None, out: Spec
) -> Array:
    dimensions = reduced_dimensions(x, dim)
    count = 1
    for d in dimensions:
        count *= x.shape[d]
    total = structured.reduce_sum(hlo.convert(x, compute_dtype(out.dtype)), dimensions)
    return hlo.reshape(total / hlo.constant(count, total.dtype), out.shape)
