"""Ranges, triangles and windows, whose sizes are found on the host; a range's first number and step are data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.hooks import check_device

aten = torch.ops.aten
Number = int | float | complex


def _range_kernel(func: OpOverload) -> Callable[..., torch.Tensor]:
    def run(*numbers: Number, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        check_device(device)
        like = func(*numbers, dtype=dtype, device="meta")
        if like.dtype is torch.bool or like.dtype.is_complex:
            raise NotImplementedError(f"{func} is not implemented for {like.dtype}")
        start, step = numbers[0] if len(numbers) > 1 else 0, numbers[2] if len(numbers) > 2 else 1
        return as_program(torch.ops.tpu.range.default)(like.shape[0], start, step, dtype=like.dtype)

    return run


for _packet, _overload in (
    ("arange", "default"),
    ("arange", "start"),
    ("arange", "start_step"),
    ("range", "default"),
    ("range", "step"),
):
    _name = _packet if _overload == "default" else f"{_packet}.{_overload}"
    kernel(_name)(_range_kernel(getattr(getattr(aten, _packet), _overload)))


def _triangle_kernel(func: OpOverload) -> Callable[..., torch.Tensor]:
    def run(row: int, col: int, offset: int = 0, **options: Any) -> torch.Tensor:
        """PyTorch's decomposition divides by the number of rows."""
        check_device(options.get("device"))
        if row == 0 or col == 0:
            return torch.empty(2, 0, dtype=options.get("dtype") or torch.int64, device="tpu")
        return as_program(func)(row, col, offset, **options)

    return run


for _packet in ("tril_indices", "triu_indices"):
    kernel(_packet)(_triangle_kernel(getattr(aten, _packet).default))


@kernel("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(
    length: int, periodic: bool = True, beta: float = 12.0, *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """PyTorch's composite kernel needs one for the device that Python can't give it."""
    points = length + 1 if periodic else length
    if length < 2:
        return torch.ones(length, dtype=dtype, device="tpu")
    x = torch.linspace(-1, 1, points, dtype=dtype, device="tpu")[:length]
    scale = torch.tensor(beta, dtype=x.dtype, device="tpu")
    return torch.i0(scale * torch.sqrt(1 - x * x)) / torch.i0(scale)
