"""What `torch.empty` holds: with `use_deterministic_algorithms(True)` PyTorch fills memory that nobody has written."""

from __future__ import annotations

from math import nan

import torch

_deterministic = torch._C._get_deterministic_algorithms
_fills = torch._C._get_deterministic_fill_uninitialized_memory


def is_filled() -> bool:
    """Whether fresh memory is filled, by PyTorch's two settings."""
    return _deterministic() and _fills()


def filler(dtype: torch.dtype) -> float | int | bool:
    """What it is filled with: NaN, or the largest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max
