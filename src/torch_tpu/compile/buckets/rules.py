"""For each family of operators, what makes it sound on padded tensors. What is named nowhere has no rule.

The families register their rules when this file imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.compile.buckets import (  # noqa: F401  (they register)
    rules_of_attention,
    rules_of_batch_norm,
    rules_of_gathers,
    rules_of_losses,
    rules_of_new_tensors,
    rules_of_products,
    rules_of_reductions,
    rules_of_rows,
    rules_of_views,
)
from torch_tpu.compile.buckets.rule_table import (
    RULES,
    Rule,
    aten,
)
from torch_tpu.compile.buckets.rules_of_elementwise import ELEMENTWISE, elementwise
from torch_tpu.ops.core import registry
from torch_tpu.ops.core.schema import signature


def find(target: Any) -> Rule | None:
    """The rule of an operator; None where padding is not sound, or nobody has thought about it."""
    if not isinstance(target, OpOverload):
        return None
    name = target.overloadpacket.__name__
    own = RULES.get(name if target._overloadname == "default" else f"{name}.{target._overloadname}")
    if own is not None and target.namespace == "aten":
        return own
    if torch.Tag.nondeterministic_seeded in target.tags or signature(target).is_inplace:
        return None
    return elementwise if torch.Tag.pointwise in target.tags or str(target) in ELEMENTWISE else None


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """For AOTAutograd: what has no rule, but consists of operators that have one."""
    parts = (aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default)
    return {func: found for func in parts if (found := registry.decomposition(func)) is not None}
