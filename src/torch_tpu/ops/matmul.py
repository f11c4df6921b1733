"""Matrix products."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, Number
from torch_tpu.ops.promotion import compute_dtype
from torch_tpu.ops.registry import Spec, lower

PRECISION = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}


def precision() -> str:
    """The StableHLO precision that `torch.set_float32_matmul_precision` asks for."""
    return PRECISION[torch.get_float32_matmul_precision()]


def dot(x: Array, y: Array, contract: tuple[list[int], list[int]], batch: tuple[list[int], list[int]] = ([], [])) -> Array:
    """A contraction accumulated in PyTorch's accumulation dtype (float32 for float16 and bfloat16)."""
    wide = compute_dtype(x.dtype)
    if x.dtype is torch.bool:
        raise TypeError("matrix product of bool")
    return structured.dot_general(x, y, contract, batch, dtype=wide, precision=precision())


@lower("mm", "dot")
def mm(a: Array, b: Array, out_dtype: torch.dtype | None = None) -> Array:
    return dot(a, b, ([a.ndim - 1], [0]))


@lower("bmm")
def bmm(a: Array, b: Array) -> Array:
    return dot(a, b, ([2], [1]), ([0], [0]))


@lower("mv")
def mv(a: Array, v: Array) -> Array:
    return dot(a, v, ([1], [0]))


@lower("addmm")
def addmm(bias: Array, a: Array, b: Array, *, beta: Array | Number, alpha: Array | Number) -> Array:
    return plus_scaled(bias, dot(a, b, ([1], [0])), beta, alpha)


@lower("baddbmm")
def baddbmm(bias: Array, a: Array, b: Array, *, beta: Array | Number, alpha: Array | Number) -> Array:
    return plus_scaled(bias, dot(a, b, ([2], [1]), ([0], [0])), beta, alpha)


def plus_scaled(bias: Array, product: Array, beta: Array | Number, alpha: Array | Number) -> Array:
    """beta·bias + alpha·product; a beta of 0 ignores NaN and infinity in the bias, as BLAS does."""
    bias = hlo.convert(bias, product.dtype)
    if isinstance(alpha, Array):
        product = product * hlo.convert(alpha, product.dtype)
    elif alpha != 1:
        product = product * alpha
    if isinstance(beta, Array):
        beta = hlo.convert(beta, product.dtype)
        return hlo.select(beta.eq(0), product, bias * beta + product)
    return product if beta == 0 else bias + product if beta == 1 else bias * beta + product
