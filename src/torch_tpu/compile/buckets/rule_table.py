"""The table of rules for padded tensors, and what rules have in common.

A rule gets the arguments of an operator in the order of its schema and returns its result for padded tensors, with the
places of the true elements. It may rely on nothing that is in the padding of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_tpu.compile.buckets.padded_layout import Layout, is_padded
from torch_tpu.compile.buckets.padded_tracer import PaddedTracer, layout_of
from torch_tpu.ops.core.schema import signature

Rule = Callable[[PaddedTracer, Node, list[Any]], Any]
aten = torch.ops.aten
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for overloads of ATen, "mm.default" without its ".default"."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name} has two rules: {RULES[name]} and {function}")
            RULES[name] = function
        return function

    return register


def argument(node: Node, values: list[Any], name: str, default: Any = None) -> Any:
    """The value of an argument by its name in the schema."""
    position = signature(node.target).positions.get(name)
    return default if position is None or values[position] is None else values[position]


def given(node: Node, values: list[Any], name: str, value: Any) -> list[Any]:
    """The values with another for the argument of this name."""
    position = signature(node.target).positions[name]
    return [*values[:position], value, *values[position + 1 :]]


def dims_of(value: Any, rank: int) -> list[int]:
    """Dimensions as operators take them: one, some or (None, empty) all."""
    if value is None or value == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in (value if isinstance(value, (list, tuple)) else [value])]


def without(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    return tuple((1,) if d in dims else dim for d, dim in enumerate(layout) if keepdim or d not in dims)


def padded_of(t: torch.Tensor, dims: Sequence[int]) -> list[int]:
    layout = layout_of(t)
    return [d for d in dims if layout and is_padded(layout[d])]


def lengths(ctx: PaddedTracer, values: list[Any]) -> list[Any]:
    """The values with padded sizes."""
    return [[ctx.length(v) for v in value] if isinstance(value, list) else ctx.length(value) for value in values]


def gradients(ctx: PaddedTracer, node: Node, values: list[Any], padded: dict[int, Layout]) -> Any:
    """Runs a backward operator; `padded` are the layouts of those results that are padded."""
    result = ctx.call(node.target, values)  # type: ignore[arg-type]
    for i, layout in padded.items():
        if isinstance(result[i], torch.Tensor):
            ctx.place(result[i], layout)
    return result
