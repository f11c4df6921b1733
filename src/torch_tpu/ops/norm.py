"""Vector norms and pairwise distances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.complex import modulus
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, lower
from torch_tpu.ops.indexing import read, region, replaced
from torch_tpu.ops.reduction import Dimensions, reduced_dimensions


def p_norm(magnitude: Array, p: float, dimensions: Sequence[int]) -> Array:
    """(Σ mᵖ)^(1/p) of non-negative `magnitude`; the extremes for p = ±inf, the count of non-zeros for p = 0."""
    if p == math.inf:
        return structured.reduce_max(magnitude, dimensions) if magnitude.size else p_norm(magnitude, 1, dimensions)
    if p == -math.inf:
        return structured.reduce_min(magnitude, dimensions)
    if p == 0:
        return structured.reduce_sum(hlo.convert(magnitude.ne(0), magnitude.dtype), dimensions)
    if p == 1:
        return structured.reduce_sum(magnitude, dimensions)
    if p == 2:
        return hlo.sqrt(structured.reduce_sum(hlo.square(magnitude), dimensions))
    return hlo.power(structured.reduce_sum(hlo.power(magnitude, p), dimensions), 1 / p)


@lower("linalg_vector_norm", static=["ord"])
def vector_norm(
    x: Array,
    ord: float = 2,
    dim: Dimensions = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Spec,
) -> Array:
    magnitude = modulus(hlo.convert(x, compute_dtype(dtype or x.dtype)))
    magnitude = hlo.convert(magnitude, compute_dtype(out.dtype))
    return hlo.reshape(p_norm(magnitude, ord, reduced_dimensions(x, dim)), out.shape)


@lower("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype", static=["p"])
def norm(
    x: Array,
    p: float | None = None,
    dim: Dimensions = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Spec,
) -> Array:
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype, out=out)


# --- distances between rows --------------------------------------------------------------------------------------


def _row_differences(x: Array, y: Array) -> Array:
    """(…, P, R, M) differences of the rows of (…, P, M) and (…, R, M), batch dimensions broadcast."""
    return hlo.expand_dims(x, -2) - hlo.expand_dims(y, -3)


def _through_product(p: float, x: Array, y: Array, mode: int | None) -> bool:
    """Whether PyTorch takes Euclidean distances from a matrix product (cdist's `compute_mode`)."""
    return p == 2 and (mode == 1 or (mode in (0, None) and max(x.shape[-2], y.shape[-2]) > 25))


@lower("_cdist_forward", static=["p"])
def cdist_forward(x: Array, y: Array, p: float, compute_mode: int | None) -> Array:
    if _through_product(p, x, y, compute_mode):
        return _euclidean_by_product(x, y)
    difference = hlo.abs_(_row_differences(x, y))
    return p_norm(difference, p, [difference.ndim - 1])


def _euclidean_by_product(x: Array, y: Array) -> Array:
    """√(|x|² - 2 x·y + |y|²), negative rounding cut off."""
    batch = hlo.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = hlo.broadcast_to(x, (*batch, *x.shape[-2:])), hlo.broadcast_to(y, (*batch, *y.shape[-2:]))
    dims, last = list(range(len(batch))), x.ndim - 1
    product = structured.dot_general(x, y, ([last], [last]), (dims, dims))
    x_square, y_square = (structured.reduce_sum(hlo.square(a), [last]) for a in (x, y))
    square = hlo.expand_dims(x_square, -1) - product * 2 + hlo.expand_dims(y_square, -2)
    return hlo.sqrt(hlo.maximum(square, 0))


@lower("_cdist_backward", static=["p"])
def cdist_backward(grad: Array, x: Array, y: Array, p: float, distance: Array, *, out: Spec) -> Array:
    """The gradient for `x`: Σ over rows of y of grad · ∂distance/∂x, 0 where PyTorch chooses that subgradient."""
    return _cdist_gradient(grad, x, y, p, distance) if grad.size else hlo.zeros(out.shape, out.dtype)


def _cdist_gradient(grad: Array, x: Array, y: Array, p: float, distance: Array) -> Array:
    difference = _row_differences(x, y)
    grad, distance = hlo.expand_dims(grad, -1), hlo.expand_dims(distance, -1)
    slope = _distance_slope(difference, distance, p)
    return structured.reduce_sum(hlo.broadcast_to(grad, slope.shape) * slope, [slope.ndim - 2])


def _distance_slope(difference: Array, distance: Array, p: float) -> Array:
    """∂distance/∂difference."""
    if p == 0:
        return hlo.full_like(difference, 0)
    if p == 1:
        return hlo.sign(difference)
    magnitude = hlo.abs_(difference)
    if p == math.inf:
        return hlo.select(magnitude.eq(distance), hlo.sign(difference), 0)
    if p == 2:
        slope, flat = difference / distance, distance.eq(0)
    else:
        slope = hlo.sign(difference) * hlo.power(magnitude / distance, p - 1)
        flat = hlo.broadcast_to(distance.eq(0), difference.shape)
        flat = flat | difference.eq(0) if p < 1 else flat
    return hlo.select(flat, 0, slope)


def _pairs(rows: int) -> tuple[Array, Array]:
    """Row and column of each entry above the diagonal, in row-major order."""
    first, second = np.triu_indices(rows, 1)
    return hlo.constant(first, torch.int32), hlo.constant(second, torch.int32)


@lower("_pdist_forward", static=["p"])
def pdist_forward(x: Array, p: float = 2.0) -> Array:
    if x.shape[0] <= 1:
        return hlo.zeros((0,), x.dtype)
    first, second = _pairs(x.shape[0])
    rows = [read(x, region(x.shape, {0: positions})) for positions in (first, second)]
    return p_norm(hlo.abs_(rows[0] - rows[1]), p, [1])


@lower("_pdist_backward", static=["p"])
def pdist_backward(grad: Array, x: Array, p: float, distance: Array) -> Array:
    if x.shape[0] <= 1 or not x.size:
        return hlo.full_like(x, 0)
    return _cdist_gradient(_symmetric(grad, x.shape[0]), x, x, p, _symmetric(distance, x.shape[0]))


def _symmetric(entries: Array, rows: int) -> Array:
    """The symmetric matrix with `entries` above its zero diagonal."""
    first, second = _pairs(rows)
    upper = replaced(hlo.zeros((rows, rows), entries.dtype), region((rows, rows), {0: first, 1: second}), entries)
    return upper + hlo.transpose(upper, [1, 0])
