"""Scaled dot-product attention as one operation with its gradient, and the fast paths of nn.MultiheadAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.registry import Spec, decompose, lower
from torch_tpu.ops.matmul import dot, matrix_product

# Above this many scores at once, blocks of queries run one after the other: on the CPU so that they stay in its cache
# (several times faster), elsewhere so that memory stays bounded.
SCORES_AT_ONCE_ON_CPU, SCORES_AT_ONCE = 2**20, 2**24
ROWS_AT_LEAST = 128


def _softmax(scores: Array) -> tuple[Array, Array]:
    """Softmax and logsumexp (without its dimension) of the last dimension; a row of -inf gives zeros and 0."""
    last = scores.ndim - 1
    highest = hlo.expand_dims(structured.reduce_max(scores, [last]), last)
    highest = hlo.select(highest.eq(-math.inf), 0, highest)
    weights = hlo.exp(scores - highest)
    total = hlo.expand_dims(structured.reduce_sum(weights, [last]), last)
    total = hlo.select(total.eq(0), 1, total)
    return weights / total, hlo.squeeze(highest + hlo.log(total), last)


def _scores(q: Array, k: Array, bias: Array | None, is_causal: bool, scale: Array, first_row: Array | int) -> Array:
    """scale · q kᵀ + bias, -inf where a query of a causal attention may not look (row < column)."""
    scores = dot(q, k, ([q.ndim - 1], [k.ndim - 1]), _batch(q)) * scale
    if bias is not None:
        scores = scores + hlo.convert(bias, scores.dtype)
    if is_causal:
        rows, columns = scores.shape[-2:]
        visible = hlo.iota((rows, columns), 1) <= hlo.iota((rows, columns), 0) + first_row
        scores = hlo.select(visible, scores, -math.inf)
    return scores


def _batch(x: Array) -> tuple[list[int], list[int]]:
    leading = list(range(x.ndim - 2))
    return leading, leading


def _kept(rng: Rng, probability: float, shape: Sequence[int], dtype: torch.dtype) -> Array:
    """Dropout's factor of each weight: 0 or 1/(1-p)."""
    keep = rng.uniform(shape, torch.float32) >= probability
    return hlo.select(keep, hlo.full(shape, 1 / (1 - probability) if probability < 1 else 0.0, dtype), 0)


def _scale(scale: ArrayLike | None, q: Array) -> Array:
    return cast(1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale, compute_dtype(q.dtype))


def _block_rows(q: Array, k: Array) -> int:
    """How many queries are taken at once."""
    rows, per_row = q.shape[-2], math.prod(q.shape[:-2]) * k.shape[-2]
    limit = SCORES_AT_ONCE_ON_CPU if module.target().platform == "cpu" else SCORES_AT_ONCE
    return min(rows, max(ROWS_AT_LEAST, limit // max(per_row, 1)))


def _rows(x: Array, start: Array, count: int) -> Array:
    """`count` of the second-last dimension's entries; a dimension of 1 (a broadcast bias) stays."""
    if x.shape[-2] == 1:
        return x
    zero = hlo.constant(0, torch.int32)
    return hlo.dynamic_slice(x, [*[zero] * (x.ndim - 2), start, zero], [*x.shape[:-2], count, x.shape[-1]])


def _set_rows(x: Array, rows: Array, start: Array) -> Array:
    zero = hlo.constant(0, torch.int32)
    return hlo.dynamic_update_slice(x, rows, [*[zero] * (x.ndim - 2), start, zero])


def _padded_rows(x: Array, count: int) -> Array:
    if x.shape[-2] == 1 != count:
        return x
    return hlo.pad(x, 0, [0] * x.ndim, [*[0] * (x.ndim - 2), count - x.shape[-2], 0])


@lower("_scaled_dot_product_fused_attention_overrideable", static=["dropout_p"])
def fused_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: ArrayLike | None = None,
    out: list[Spec],
    rng: Rng,
) -> list[Array | None]:
    """Result, logsumexp, and the random state its dropout used, from which the gradient makes the same mask."""
    scale = _scale(scale, q)
    if dropout_p:
        state = rng.position()
        rng.skip(math.prod(q.shape[:-1]) * k.shape[-2])
    else:
        state = hlo.zeros((2,), torch.uint64)

    def attend(q: Array, bias: Array | None, first_row: Array | int) -> list[Array]:
        weights, logsumexp = _softmax(_scores(q, k, bias, is_causal, scale, first_row))
        if dropout_p:
            weights = weights * _kept(rng.resumed(state), dropout_p, weights.shape, weights.dtype)
        return [matrix_product(hlo.convert(weights, v.dtype), v), hlo.expand_dims(logsumexp, -1)]

    rows, block = q.shape[-2], _block_rows(q, k)
    if rows <= block or dropout_p:
        result, logsumexp = attend(q, bias, 0)
    else:
        steps = -(-rows // block)
        q = _padded_rows(q, steps * block)
        padded_bias = None if bias is None else _padded_rows(bias, steps * block)
        shape, wide = (*q.shape[:-2], steps * block), compute_dtype(q.dtype)

        def step(i: Array, result: Array, logsumexp: Array) -> list[Array]:
            start = i * block
            bias_rows = None if padded_bias is None else _rows(padded_bias, start, block)
            new = attend(_rows(q, start, block), bias_rows, start)
            return [_set_rows(result, new[0], start), _set_rows(logsumexp, new[1], start)]

        initial = [hlo.zeros((*shape, v.shape[-1]), wide), hlo.zeros((*shape, 1), wide)]
        result, logsumexp = (hlo.slice_in_dim(a, 0, rows, dim=-2) for a in structured.fori_loop(steps, step, initial))
    seed, offset = (hlo.reshape(hlo.slice_in_dim(state, i, i + 1), ()) for i in range(2))
    seed, offset = hlo.bitcast(seed, torch.int64), hlo.bitcast(offset, torch.int64)
    return [result, hlo.reshape(logsumexp, out[1].shape), None, None, seed, offset, None]


@lower("_scaled_dot_product_fused_attention_overrideable_backward", static=["dropout_p"])
def fused_attention_backward(
    grad: Array | None,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Sequence[bool],
    result: Array,
    logsumexp: Array,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Array,
    offset: Array,
    *,
    scale: ArrayLike | None = None,
    rng: Rng,
) -> list[Array | None]:
    """With P = softmax(S): dV = Pᵀ dO, dS = P ∘ (dP - Σ dP ∘ P), dQ = scale · dS K, dK = scale · dSᵀ Q, dB = dS.

    The weights are made again from q and k: the saved logsumexp is float32, too coarse for float64. Without a gradient
    of the result, which is what autograd has where a later function returned None, there are zeros.
    """
    if grad is None:
        return [None if x is None else hlo.zeros(x.shape, x.dtype) for x in (q, k, v, bias)]
    scale = _scale(scale, q)
    state = hlo.concatenate([hlo.reshape(hlo.bitcast(a, torch.uint64), (1,)) for a in (seed, offset)], 0)
    narrow: Callable[[Array], Array] = lambda x: hlo.convert(x, q.dtype)  # noqa: E731

    def block_gradients(q: Array, grad: Array, bias: Array | None, first_row: Array | int) -> list[Array]:
        weights, _ = _softmax(_scores(q, k, bias, is_causal, scale, first_row))
        kept = _kept(rng.resumed(state), dropout_p, weights.shape, weights.dtype) if dropout_p else 1
        last, second = weights.ndim - 1, weights.ndim - 2
        grad_v = dot(narrow(weights * kept), grad, ([second], [second]), _batch(q))
        grad_weights = dot(grad, v, ([last], [last]), _batch(q)) * kept
        along = hlo.expand_dims(structured.reduce_sum(grad_weights * weights, [last]), last)
        grad_scores = weights * (grad_weights - along)
        grad_q = matrix_product(narrow(grad_scores), k) * scale
        grad_k = dot(narrow(grad_scores), q, ([second], [second]), _batch(q)) * scale
        return [grad_k, grad_v, grad_q, *([] if bias is None else [grad_scores])]

    rows, block = q.shape[-2], _block_rows(q, k)
    if rows <= block or dropout_p:
        grad_k, grad_v, grad_q, *grad_bias = block_gradients(q, grad, bias, 0)
    else:
        steps = -(-rows // block)
        q, grad = _padded_rows(q, steps * block), _padded_rows(grad, steps * block)
        padded_bias = None if bias is None else _padded_rows(bias, steps * block)

        def step(i: Array, grad_k: Array, grad_v: Array, *by_row: Array) -> list[Array]:
            start = i * block
            bias_rows = None if padded_bias is None else _rows(padded_bias, start, block)
            new_k, new_v, *new = block_gradients(_rows(q, start, block), _rows(grad, start, block), bias_rows, start)
            return [grad_k + new_k, grad_v + new_v, *(_set_rows(o, n, start) for o, n in zip(by_row, new, strict=True))]

        wide = compute_dtype(q.dtype)
        shapes = [k.shape, v.shape, q.shape, *([] if bias is None else [(*q.shape[:-1], k.shape[-2])])]
        grad_k, grad_v, *by_row = structured.fori_loop(steps, step, [hlo.zeros(s, wide) for s in shapes])
        grad_q, *grad_bias = (hlo.slice_in_dim(a, 0, rows, dim=-2) for a in by_row)
    of_bias = None if bias is None or not mask[3] else _sum_to(grad_bias[0], bias.shape)
    return [grad_q, grad_k, grad_v, of_bias]


def _sum_to(x: Array, shape: Sequence[int]) -> Array:
    """The gradient of broadcasting `shape` to the shape of `x`."""
    spread = [d for d in range(x.ndim) if d < x.ndim - len(shape) or shape[d - x.ndim + len(shape)] != x.shape[d]]
    return hlo.reshape(structured.reduce_sum(x, spread), shape)


# --- the same under the name of the CPU's kernel ------------------------------------------------------------------

Tensor = torch.Tensor


@decompose("_scaled_dot_product_flash_attention_for_cpu")
def cpu_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    results = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )
    return results[0], _heads_inside(results[1])


def _heads_inside(x: Tensor) -> Tensor:
    """The same tensor, in memory in the order of (batch, length, heads, …), as that kernel makes it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@decompose("_scaled_dot_product_flash_attention_for_cpu_backward")
def cpu_flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, no_dropout = (None, None, query.shape[2], key.shape[2]), torch.zeros((), dtype=torch.int64, device="meta")
    wanted = [True, True, True, False]
    gradients = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
        grad,
        query,
        key,
        value,
        attn_mask,
        wanted,
        result,
        logsumexp,
        *lengths,
        dropout_p,
        is_causal,
        no_dropout,
        no_dropout,
        scale=scale,
    )
    return _heads_inside(gradients[0]), _heads_inside(gradients[1]), _heads_inside(gradients[2])


# --- fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation ------------------------------


@decompose("_native_multi_head_attention")
def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Inputs are (batch, length, width). `mask` is true or nonzero where not to look.

    mask_type: 0 is a (queries, keys) mask, 1 a (batch, keys) one, 2 one of all four dimensions.
    """
    batch = query.shape[0]
    projected = [
        F.linear(x, w, b).reshape(batch, x.shape[1], num_head, embed_dim // num_head).transpose(1, 2)
        for x, w, b in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    ]
    q, k, v = projected
    scores = (q / math.sqrt(embed_dim // num_head)) @ k.transpose(-1, -2)
    if mask is not None:
        mask = mask.bool()
        scores = scores.masked_fill(mask[:, None, None, :] if mask_type == 1 else mask, -math.inf)
    weights = scores.softmax(-1)
    heads = (weights @ v).transpose(1, 2).reshape(batch, query.shape[1], embed_dim)
    result = F.linear(heads, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


@decompose("_transform_bias_rescale_qkv")
def split_heads(qkv: Tensor, bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, length, 3 · width) plus its bias as queries, keys and values by head; queries scaled for attention."""
    batch, length, width = *qkv.shape[:2], qkv.shape[2] // 3
    heads = (qkv + bias).reshape(batch, length, 3, num_heads, width // num_heads).permute(2, 0, 3, 1, 4).contiguous()
    query, key, value = heads.unbind()
    return query / math.sqrt(width // num_heads), key, value


@decompose("_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    x: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attention(x: Tensor) -> Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
        )[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))
    x = norm_1(x + attention(x))
    return norm_2(x + feed_forward(x))
