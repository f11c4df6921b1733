"""Rows of sparse matrices, as sorted indices or as where each row begins: plain tensors that PyTorch converts."""

from __future__ import annotations

import torch

from torch_tpu.ops.core.registry import decompose


@decompose("_convert_indices_from_coo_to_csr")
def beginnings_of_rows(rows: torch.Tensor, size: int, *, out_int32: bool = False) -> torch.Tensor:
    numbers = torch.arange(size + 1, dtype=rows.dtype, device=rows.device)
    return torch.searchsorted(rows, numbers, out_int32=out_int32)


@decompose("_convert_indices_from_csr_to_coo")
def indices_of_rows(
    beginnings: torch.Tensor, columns: torch.Tensor, *, out_int32: bool = False, transpose: bool = False
) -> torch.Tensor:
    """Indices of the batch, if there is one, then of row and column, each in one row of the result."""
    places = torch.arange(columns.shape[-1], dtype=beginnings.dtype, device=columns.device).expand(columns.shape)
    rows = torch.searchsorted(beginnings, places.contiguous(), right=True) - 1
    lines = [torch.arange(n, device=columns.device) for n in columns.shape[:-1]]
    batch = [line.reshape(-1, *[1] * (columns.dim() - 1 - d)).expand(columns.shape) for d, line in enumerate(lines)]
    lines = [*batch, columns, rows] if transpose else [*batch, rows, columns]
    return torch.stack([line.reshape(-1).to(torch.int32 if out_int32 else torch.int64) for line in lines])
