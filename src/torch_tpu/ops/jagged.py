"""Rows of different lengths, packed one after the other, and the same rows padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.ops.core.registry import decompose

Tensor = torch.Tensor


@decompose("_jagged_to_padded_dense_forward")
def jagged_to_padded(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    """Row b is values[offsets[b]:offsets[b + 1]], cut or padded to the length."""
    starts, ends, length = offsets[0][:-1], offsets[0][1:], max_lengths[0]
    _require_one_level(offsets, max_lengths)
    source = starts.unsqueeze(1) + torch.arange(length, device=values.device)
    inside = source < ends.unsqueeze(1)
    inside = inside.reshape(*inside.shape, *[1] * (values.dim() - 1))
    if not values.shape[0]:
        return values.new_full((starts.shape[0], length, *values.shape[1:]), padding_value)
    rows = values[source.clamp(max=values.shape[0] - 1)]
    return torch.where(inside, rows, torch.full((), padding_value, dtype=values.dtype, device=values.device))


@decompose("_padded_dense_to_jagged_forward")
def padded_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_L: int) -> Tensor:
    """The first offsets[b + 1] - offsets[b] entries of each row; zeros where a row is shorter."""
    _require_one_level(offsets, dense.shape[1:2])
    position = torch.arange(total_L, dtype=offsets[0].dtype, device=dense.device)
    row = torch.searchsorted(offsets[0], position, right=True) - 1
    row = row.clamp(0, dense.shape[0] - 1)
    within = position - offsets[0][row]
    found = dense[row, within.clamp(max=dense.shape[1] - 1)]
    inside = (within < dense.shape[1]).reshape(-1, *[1] * (found.dim() - 1))
    return torch.where(inside, found, torch.zeros((), dtype=dense.dtype, device=dense.device))


def _require_one_level(offsets: Sequence[Tensor], lengths: Sequence[int]) -> None:
    if not len(offsets) == len(lengths) == 1:
        raise RuntimeError("only one jagged dimension is supported")
