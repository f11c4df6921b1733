"""Rules of elementwise operators: padding stays in the padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from torch_tpu.compile.buckets.padded_tracer import PaddedTracer

ELEMENTWISE = frozenset(
    {
        *("aten._to_copy.default", "aten.copy.default", "aten.detach.default", "aten.alias.default"),
        *("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "prims.convert_element_type.default"),
        *("aten.clone.default", "aten.fill.Scalar", "aten.fill.Tensor", "aten.native_dropout_backward.default"),
    }
)


def elementwise(ctx: PaddedTracer, node: Node, values: list[Any]) -> Any:
    tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    layout = ctx.broadcast(tensors)
    result = ctx.call(node.target, values)  # type: ignore[arg-type]
    uniform = all(getattr(t, "uniform", not t.dim()) for t in tensors)
    for t in tree_leaves(result):
        ctx.place(t, layout, uniform=uniform)
    return result
