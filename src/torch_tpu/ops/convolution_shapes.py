"""Shapes and layouts of convolutions' results, for which PyTorch has no meta kernel: fake tensors ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import operator
from torch_tpu.patching.patch_registry import Moment, optional

Ints = Sequence[int]


def _memory_format(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels-last if one of the operands is, as the CPU's kernels decide (oneDNN; native ones for float64)."""
    formats = {suggest_memory_format(x), suggest_memory_format(weight)}
    for format in (torch.channels_last, torch.channels_last_3d):
        if format in formats:
            return format
    return torch.contiguous_format


def _meta_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> torch.Tensor:
    result = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return torch.empty_like(result, memory_format=_memory_format(x, weight))


def _meta_convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    transposed, groups = rest[3], rest[5]
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *rest)


@optional(
    "convolution",
    "convolutions are programs: PyTorch has no kernel that tells their results' shapes",
    operator("aten.convolution_overrideable.default", "input", "weight", "bias", "stride", "padding", "dilation"),
    operator("aten.convolution_backward_overrideable.default", "grad_output", "input", "weight", "stride", "padding"),
    moment=Moment.CALL,
)
def tell_shapes(changes: Changes) -> None:
    library = torch.library.Library("aten", "IMPL")
    changes.on_undo(lambda: library._destroy())
    library.impl("convolution_overrideable", _meta_convolution, "Meta")
    library.impl("convolution_backward_overrideable", _meta_convolution_backward, "Meta")


tell_shapes.apply()
