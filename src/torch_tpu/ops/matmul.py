"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, decompose, lower

# Of so many rows a transposed matrix is written out before it multiplies another (the gradient of a weight): XLA:CPU
# would read it down its columns. (1024, 1024) @ (1024, 256) 4.7 → 2.9 ms, (256, 1024) @ (1024, 256) 0.84 → 0.70.
ROWS_TO_WRITE_OUT = 128

PRECISION = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}


def precision() -> str:
    """The StableHLO precision that `torch.set_float32_matmul_precision` asks for."""
    module.target().reads_precision = True
    return PRECISION[torch.get_float32_matmul_precision()]


def dot(
    x: Array, y: Array, contract: tuple[list[int], list[int]], batch: tuple[list[int], list[int]] = ([], [])
) -> Array:
    """A contraction accumulated in PyTorch's accumulation dtype (float32 for float16 and bfloat16)."""
    if x.dtype is torch.bool:
        if x.size and y.size:
            raise NotImplementedError("matrix product not implemented for 'Bool'")
        free = [
            [n for d, n in enumerate(a.shape) if d not in (*c, *b)]
            for a, c, b in zip((x, y), contract, batch, strict=True)
        ]
        return hlo.zeros([*(x.shape[d] for d in batch[0]), *free[0], *free[1]], torch.bool)
    if x.dtype is not y.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {x.dtype} != {y.dtype}")
    return structured.dot_general(x, y, contract, batch, dtype=compute_dtype(x.dtype), precision=precision())


def matrix_product(a: Array, b: Array) -> Array:
    """a @ b over the last two dimensions; leading ones are batch dimensions, the same in both."""
    leading = list(range(a.ndim - 2))
    if leading and math.prod(a.shape[:-2]) == 1:
        # XLA:CPU can't run every product of bfloat16 with a batch of one.
        return dot(a.reshape(*a.shape[-2:]), b.reshape(*b.shape[-2:]), ([1], [0])).reshape(*a.shape[:-1], b.shape[-1])
    if not leading and a.shape[0] >= ROWS_TO_WRITE_OUT and hlo.is_transposed(a) and a.dtype is torch.float32:
        a = on_cpu_in_memory(a)
    return dot(a, b, ([a.ndim - 1], [b.ndim - 2]), (leading, leading))


def on_cpu_in_memory(x: Array) -> Array:
    """On XLA:CPU `x` in memory of its own, not computed while it is read."""
    return structured.optimization_barrier(x) if module.target().platform == "cpu" else x


@lower("mm", "mm.dtype", "bmm", "bmm.dtype")
def mm(a: Array, b: Array, out_dtype: torch.dtype | None = None) -> Array:
    return matrix_product(a, b)


@lower("mv", "dot")
def mv(a: Array, v: Array) -> Array:
    return dot(a, v, ([a.ndim - 1], [0]))


@lower("vdot")
def vdot(x: Array, y: Array) -> Array:
    return dot(hlo.conj(x), y, ([0], [0]))


@lower("addmm", "baddbmm")
def addmm(bias: Array, a: Array, b: Array, *, beta: ArrayLike, alpha: ArrayLike) -> Array:
    return plus_scaled(bias, matrix_product(a, b), beta, alpha)


@lower("addmm.dtype", "baddbmm.dtype")
def addmm_dtype(bias: Array, a: Array, b: Array, out_dtype: torch.dtype, *, beta: ArrayLike, alpha: ArrayLike) -> Array:
    return plus_scaled(bias, matrix_product(a, b), beta, alpha)


@lower("addmv")
def addmv(bias: Array, a: Array, v: Array, *, beta: ArrayLike, alpha: ArrayLike) -> Array:
    return plus_scaled(bias, mv(a, v), beta, alpha)


@lower("addbmm")
def addbmm(bias: Array, a: Array, b: Array, *, beta: ArrayLike, alpha: ArrayLike) -> Array:
    return plus_scaled(bias, dot(a, b, ([0, 2], [0, 1])), beta, alpha)


@lower("addr")
def addr(bias: Array, x: Array, y: Array, *, beta: ArrayLike, alpha: ArrayLike, out: Spec) -> Array:
    wide = compute_dtype(out.dtype)
    x, y = hlo.expand_dims(hlo.convert(x, wide), 1), hlo.expand_dims(hlo.convert(y, wide), 0)
    if out.dtype is torch.bool:
        return _plus_scaled_bool(bias, x & y, beta, alpha)
    return plus_scaled(bias, x * y, beta, alpha)


@lower("_addmm_activation", static=["use_gelu"])
def addmm_activation(bias: Array, a: Array, b: Array, *, beta: ArrayLike, alpha: ArrayLike, use_gelu: bool) -> Array:
    """gelu (its tanh form, as cuBLASLt's epilogue) or relu of addmm."""
    x = plus_scaled(bias, matrix_product(a, b), beta, alpha)
    if not use_gelu:
        return hlo.maximum(x, 0)
    return x * 0.5 * (hlo.tanh((x + x * x * x * 0.044715) * 0.7978845608028654) + 1)


@lower("_int_mm")
def int_mm(a: Array, b: Array) -> Array:
    if not a.dtype is b.dtype is torch.int8:
        raise RuntimeError(f"_int_mm: Expected both matrices to be int8 but got {a.dtype} and {b.dtype}")
    return structured.dot_general(a, b, ([1], [0]), dtype=torch.int32)


@lower("_weight_int8pack_mm")
def weight_int8pack_mm(x: Array, weight: Array, scales: Array) -> Array:
    """x @ weightᵀ with int8 weights that have a scale per row."""
    product = dot(x, hlo.convert(weight, x.dtype), ([1], [1]))
    return product * hlo.convert(scales, product.dtype)


@lower("_scaled_mm")
def scaled_mm(
    a: Array,
    b: Array,
    scale_a: Array,
    scale_b: Array,
    bias: Array | None = None,
    scale_result: Array | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Array:
    """(scale_a·a) @ (scale_b·b) + bias for float8 matrices; a scale is one number, one per row of a or column of b."""
    product = structured.dot_general(
        hlo.convert(a, torch.bfloat16), hlo.convert(b, torch.bfloat16), ([1], [0]), dtype=torch.float32
    )
    result = product * _scale(scale_a) * _scale(scale_b)
    if bias is not None:
        result = result + hlo.convert(bias, torch.float32)
    return result if scale_result is None else result * _scale(scale_result)


# How many elements share a scale, of `torch.nn.functional.ScalingType`.
_PER_MATRIX, _PER_ROW = 0, 1


@decompose("_scaled_mm_v2")
def scaled_mm_v2(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """With one scale per matrix, or one per row of a and column of b; as on the CPU, no other recipes."""
    recipes = [*recipe_a], [*recipe_b]
    if recipes not in (([_PER_MATRIX], [_PER_MATRIX]), ([_PER_ROW], [_PER_ROW])):
        raise RuntimeError(
            "scaled_mm on the tpu device takes a scale per matrix or per row; scales per block it doesn't"
        )
    scales = scale_a[0], scale_b[0]
    if recipe_a[0] == _PER_ROW:
        scales = scales[0].reshape(-1, 1), scales[1].reshape(1, -1)
    return torch._scaled_mm(a, b, *scales, bias, None, out_dtype, use_fast_accum)


def _scale(scale: Array) -> Array:
    return hlo.reshape(scale, ()) if scale.size == 1 else scale


# --- sums of products of several tensors -------------------------------------------------------------------------


@lower("_compute_linear_combination")
def linear_combination(x: Array, coefficients: Array) -> Array:
    """Row i of the result is Σ coefficients[i, j] · x[j]."""
    return dot(coefficients, x, ([1], [0]))


@decompose("_trilinear")
def trilinear(
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Σ x·y·z over `sumdim`, each with dimensions inserted at its `expand`; a matrix product where x meets y.

    Half precision is rounded once, not after each of the two products.
    """
    ndim = x.dim() + len(expand1)
    letters = "abcdefghijklmnopqrstuvwxyz"[:ndim]
    terms = ["".join(c for d, c in enumerate(letters) if d not in expand) for expand in (expand1, expand2, expand3)]
    kept = "".join(c for d, c in enumerate(letters) if d not in sumdim)
    wide = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in (x, y, z)]
    return torch.einsum(f"{','.join(terms)}->{kept}", *wide).to(x.dtype)


def plus_scaled(bias: Array, product: Array, beta: ArrayLike, alpha: ArrayLike) -> Array:
    """beta·bias + alpha·product; a beta of 0 ignores NaN and infinity in the bias, as BLAS does."""
    if bias.ndim > product.ndim:
        raise RuntimeError(f"a tensor of shape {list(bias.shape)} can't be expanded to shape {list(product.shape)}")
    bias = hlo.convert(bias, product.dtype)
    if isinstance(alpha, Array):
        product = product * hlo.convert(alpha, product.dtype)
    elif alpha != 1:
        product = product * alpha
    if isinstance(beta, Array):
        beta = hlo.convert(beta, product.dtype)
        return hlo.select(beta.eq(0), product, bias * beta + product)
    return product if beta == 0 else bias + product if beta == 1 else bias * beta + product


def _plus_scaled_bool(bias: Array, product: Array, beta: ArrayLike, alpha: ArrayLike) -> Array:
    """`plus_scaled` where + is or and · is and."""

    def scaled(x: Array, factor: ArrayLike) -> Array:
        return x & hlo.convert(factor, torch.bool) if isinstance(factor, Array) else x & bool(factor)

    return scaled(bias, beta) | scaled(product, alpha)
