"""Softmax, its logarithm and their derivatives. Float16 and bfloat16 compute in float32 and round once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import cast, compute_dtype, elementwise
from torch_tpu.ops.core.registry import lower


def _over(reduce: Callable[[Array, list[int]], Array], x: Array, dim: int) -> Array:
    """A reduction along one dimension, which stays with size 1."""
    return hlo.expand_dims(reduce(x, [dim % x.ndim]), dim) if x.ndim else x


def _shifted(x: Array, dim: int) -> Array:
    return x - _over(structured.reduce_max, x, dim)


def softmax(x: Array, dim: int) -> Array:
    weights = hlo.exp(_shifted(x, dim))
    return weights / _over(structured.reduce_sum, weights, dim)


@elementwise("_softmax")
def _softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    return softmax(x, dim)


@elementwise("_log_softmax")
def _log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    shifted = _shifted(x, dim)
    return shifted - hlo.log(_over(structured.reduce_sum, hlo.exp(shifted), dim))


@lower("_softmax_backward_data")
def softmax_backward(grad: Array, y: Array, dim: int, input_dtype: torch.dtype) -> Array:
    grad, y = cast([grad, y], compute_dtype(y.dtype))
    weighted = grad * y
    return weighted - y * _over(structured.reduce_sum, weighted, dim)


@lower("_log_softmax_backward_data")
def log_softmax_backward(grad: Array, y: Array, dim: int, input_dtype: torch.dtype) -> Array:
    grad, y = cast([grad, y], compute_dtype(y.dtype))
    return grad - hlo.exp(y) * _over(structured.reduce_sum, grad, dim)


# PyTorch has no meta kernels for these two: they say the result's dtype themselves.


@lower("_masked_softmax")
def masked_softmax(x: Array, mask: Array, dim: int | None = None, mask_type: int | None = None) -> Array:
    """Softmax over the positions where the mask is false; NaN where there are none.

    Args:
        mask_type: 0, a mask for each pair of positions; 1, for each key of a batch; 2, of the shape of `x`.
    """
    if mask_type == 1:
        mask = hlo.expand_dims(mask, 1, 2)
    wide = hlo.convert(x, compute_dtype(x.dtype))
    return hlo.convert(softmax(hlo.select(mask, -math.inf, wide), -1 if dim is None else dim), x.dtype)


@lower("_masked_softmax_backward")
def masked_softmax_backward(grad: Array, y: Array, mask: Array, dim: int | None = None) -> Array:
    wide_grad, wide_y = cast([grad, y], compute_dtype(y.dtype))
    weighted = hlo.select(mask, 0, wide_grad * wide_y)
    total = _over(structured.reduce_sum, weighted, -1 if dim is None else dim)
    return hlo.convert(hlo.select(mask, 0, weighted - wide_y * total), y.dtype)
