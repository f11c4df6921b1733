"""FlexAttention and its gradient, tile by tile: no intermediate has queries × keys elements.

The forward is the online softmax of FlashAttention (Dao et al., 2022); the gradient computes each tile again from the
saved logsumexp (FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import decompose, lower_higher_order
from torch_tpu.ops.flex_scores import Attention
from torch_tpu.ops.math import flex_tiles
from torch_tpu.ops.math.flex_tiles import Tiling
from torch_tpu.ops.tracing.subgraph import tensor
from torch_tpu.ops.tracing.tracer import Tracer

_LN2 = math.log(2)


# --- forward -----------------------------------------------------------------------------------------------------


@lower_higher_order("flex_attention")
def flex_attention(
    tracer: Tracer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, ...]:
    """The result, and of the scores of each query the logsumexp and the maximum, divided by ln 2."""
    attention = Attention.of(
        tracer, (query, key, value), score_mod, block_mask, scale, score_mod_other_buffers, mask_mod_other_buffers
    )
    tiling, dtype = attention.tiling, attention.dtype
    width = value.shape[3]

    def row_of_tiles(row: Array) -> list[Array]:
        queries = flex_tiles.rows(attention.query, row, tiling.rows)

        def step(i: Array, highest: Array, total: Array, result: Array) -> list[Array]:
            chosen = tiling.choose(row, i)
            indices = attention.indices(row, chosen)
            scores = indices.modified(attention.scores(queries, attention.columns(attention.key, chosen)))
            scores = hlo.select(indices.visible(), scores, -math.inf)
            new_highest = hlo.maximum(highest, hlo.expand_dims(structured.reduce_max(scores, [3]), 3))
            reference = hlo.select(new_highest.eq(-math.inf), 0, new_highest)
            weights, kept = hlo.exp(scores - reference), hlo.exp(highest - reference)
            values = attention.columns(attention.value, chosen)
            added = attention.product(hlo.convert(weights, values.dtype), values)
            new_total = total * kept + hlo.expand_dims(structured.reduce_sum(weights, [3]), 3)
            return [new_highest, new_total, result * kept + hlo.convert(added, dtype)]

        column = (*attention.heads, tiling.rows, 1)
        initial = [hlo.full(column, -math.inf, dtype), hlo.zeros(column, dtype)]
        initial.append(hlo.zeros((*column[:3], width), dtype))
        highest, total, result = _over_columns(tiling, row, step, initial)
        some = hlo.select(total.eq(0), 1, total)
        return [result / some, (highest + hlo.log(total)) * (1 / _LN2), highest * (1 / _LN2)]

    results = _over_rows(attention, row_of_tiles, [width, 1, 1])
    result, logsumexp, highest = (hlo.slice_in_dim(a, 0, query.shape[2], dim=2) for a in results)
    made = torch.ops.aten.empty_like(query.new_empty((*query.shape[:3], width)))
    return (
        tracer.fresh(_with_strides_of(query, made), hlo.convert(result, query.dtype)),
        tensor(tracer, hlo.squeeze(logsumexp, 3)),
        tensor(tracer, hlo.squeeze(highest, 3)),
    )


def _with_strides_of(like: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.flex_attention import _permute_strides

    return _permute_strides(made, like.stride())


def _over_columns(tiling: Tiling, row: Array, step: Any, initial: list[Array]) -> list[Array]:
    """Runs `step(i, *carried)` for each listed tile of a row of tiles."""
    zero = hlo.constant(0, torch.int32)
    if tiling.lists is None and tiling.column_tiles == 1:
        result: list[Array] = step(zero, *initial)
        return result
    steps = tiling.steps(row)
    return structured.while_loop(
        [zero, *initial], lambda i, *carried: i < steps, lambda i, *carried: [i + 1, *step(i, *carried)]
    )[1:]


def _over_rows(attention: Attention, row_of_tiles: Any, widths: Sequence[int], carried: Sequence[Array] = ()) -> Any:
    """What `row_of_tiles(row, *carried)` returns for each row of tiles, put together; then what it carries on."""
    tiling, count = attention.tiling, len(widths)
    if tiling.row_tiles == 1:
        return row_of_tiles(hlo.constant(0, torch.int32), *carried)
    whole = [hlo.zeros((*attention.heads, tiling.row_tiles * tiling.rows, w), attention.dtype) for w in widths]

    def step(row: Array, *arrays: Array) -> list[Array]:
        results = row_of_tiles(row, *arrays[count:])
        written = [flex_tiles.set_rows(w, r, row) for w, r in zip(arrays[:count], results[:count], strict=True)]
        return [*written, *results[count:]]

    return structured.fori_loop(tiling.row_tiles, step, [*whole, *carried])


# --- gradient ----------------------------------------------------------------------------------------------------


@lower_higher_order("flex_attention_backward")
def flex_attention_backward(
    tracer: Tracer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    fw_graph: GraphModule,
    joint_graph: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """With P = exp(S - L): dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - Σ dO ∘ O + dL), through `score_mod`, dQ = dS K, dK = dSᵀ Q."""
    attention = Attention.of(
        tracer, (query, key, value), fw_graph, block_mask, scale, score_mod_other_buffers, mask_mod_other_buffers
    )
    tiling, dtype, heads = attention.tiling, attention.dtype, attention.heads
    length = tiling.row_tiles * tiling.rows
    grad = hlo.zeros(out.shape, query.dtype) if grad_out is None else tracer.read(grad_out)
    wide = hlo.convert(grad, dtype) * hlo.convert(tracer.read(out), dtype)
    along = hlo.expand_dims(structured.reduce_sum(wide, [3]), 3)
    if grad_logsumexp is not None:
        along = along - hlo.expand_dims(hlo.convert(tracer.read(grad_logsumexp), dtype), 3) * (1 / _LN2)
    grad, along = flex_tiles.padded(grad, length), flex_tiles.padded(along, length)
    logarithm = hlo.expand_dims(hlo.convert(tracer.read(logsumexp), dtype), 3) * _LN2
    # Queries that see nothing, and those in the padding, have weights of 0.
    logarithm = flex_tiles.padded(hlo.select(logarithm.eq(-math.inf), math.inf, logarithm), length, math.inf)
    buffers = [b for b in score_mod_other_buffers if isinstance(b, torch.Tensor)]

    def row_of_tiles(row: Array, *carried: Array) -> list[Array]:
        queries, grads, sums, logs = (
            flex_tiles.rows(x, row, tiling.rows) for x in (attention.query, grad, along, logarithm)
        )

        def step(i: Array, grad_query: Array, grad_key: Array, grad_value: Array, *of_buffers: Array) -> list[Array]:
            chosen = tiling.choose(row, i)
            indices = attention.indices(row, chosen)
            keys, values = attention.columns(attention.key, chosen), attention.columns(attention.value, chosen)
            scores = attention.scores(queries, keys)
            visible = indices.visible()
            weights = hlo.select(visible, hlo.exp(indices.modified(scores) - logs), 0)
            grad_weights = hlo.convert(attention.product(grads, hlo.transpose(values, [0, 1, 3, 2])), dtype)
            grad_scores, *grad_buffers = indices.gradients(joint_graph, scores, weights * (grad_weights - sums))
            assert grad_scores is not None
            grad_scores = hlo.select(visible, hlo.convert(grad_scores, dtype) * scale, 0)
            narrow, narrow_weights = (hlo.convert(a, query.dtype) for a in (grad_scores, weights))
            own = keys.shape[1]
            new_key = hlo.convert(attention.product_of_rows(narrow, queries, own), dtype)
            new_value = hlo.convert(attention.product_of_rows(narrow_weights, grads, own), dtype)
            added = [
                g for b, g in zip(score_mod_other_buffers, grad_buffers, strict=True) if isinstance(b, torch.Tensor)
            ]
            return [
                grad_query + hlo.convert(attention.product(narrow, keys), dtype),
                flex_tiles.add_columns(grad_key, new_key, tiling, chosen, *heads),
                flex_tiles.add_columns(grad_value, new_value, tiling, chosen, *heads),
                *(
                    total if g is None else structured.accumulate(total, hlo.convert(g, total.dtype))
                    for total, g in zip(of_buffers, added, strict=True)
                ),
            ]

        return _over_columns(tiling, row, step, [hlo.zeros(queries.shape, dtype), *carried])

    carried = [hlo.zeros(x.shape, dtype) for x in (attention.key, attention.value)]
    carried += [hlo.zeros(tuple(b.shape), _sum_dtype(b.dtype, dtype)) for b in buffers]
    grad_query, grad_key, grad_value, *of_buffers = _over_rows(attention, row_of_tiles, [query.shape[3]], carried)
    results = []
    for like, array in zip((query, key, value), (grad_query, grad_key, grad_value), strict=True):
        array = hlo.convert(hlo.slice_in_dim(array, 0, like.shape[2], dim=2), like.dtype)
        results.append(tracer.fresh(_with_strides_of(like, torch.ops.aten.new_empty(like, like.shape)), array))
    given = iter([tensor(tracer, hlo.convert(a, b.dtype)) for a, b in zip(of_buffers, buffers, strict=True)])
    return *results, tuple(next(given) if isinstance(b, torch.Tensor) else None for b in score_mod_other_buffers)


def _sum_dtype(dtype: torch.dtype, scores: torch.dtype) -> torch.dtype:
    return scores if dtype.is_floating_point else dtype


@decompose("flex_lib::zeros_and_scatter")
def zeros_and_scatter(shape: Sequence[int], indices: list[torch.Tensor], vals: torch.Tensor) -> torch.Tensor:
    """The gradient of reading a buffer at some positions."""
    return torch.ops.aten.index_put(vals.new_zeros(shape), indices, vals, True)
