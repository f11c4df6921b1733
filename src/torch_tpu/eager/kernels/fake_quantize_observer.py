"""The observer of fake quantisation, whose state gets its size from the first rows it sees."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel

_run = as_program(torch.ops.aten._fused_moving_avg_obs_fq_helper.default)


@kernel("_fused_moving_avg_obs_fq_helper")
def fused_moving_average_observer(
    x: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Any:
    state = {running_min: math.inf, running_max: -math.inf, scale: 1, zero_point: 0}
    if per_row_fake_quant:
        for tensor, start in state.items():
            if tensor.numel() != x.shape[0]:
                tensor.resize_(x.shape[0]).fill_(start)
    numbers = (averaging_const, quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant)
    return _run(x, observer_on, fake_quant_on, *state, *numbers)
