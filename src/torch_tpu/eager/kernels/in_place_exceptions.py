"""In-place operators of which PyTorch's meta kernels refuse what the CPU allows: another shape, powers of bools."""

from __future__ import annotations

import torch

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.dispatch.out_form import place
from torch_tpu.eager.kernel_table import kernel

aten = torch.ops.aten


@kernel("addbmm_")
def addbmm_(
    t: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: complex = 1, alpha: complex = 1
) -> torch.Tensor:
    """On the CPU it is `addbmm` with the tensor as `out=`, so one of another shape gets that of the result."""
    if a.dim() == b.dim() == 3 and t.shape != (a.shape[1], b.shape[2]):
        place(t, torch.addbmm(t, a, b, beta=beta, alpha=alpha))
        return t
    result: torch.Tensor = as_program(aten.addbmm_.default)(t, a, b, beta=beta, alpha=alpha)
    return result


@kernel("pow_.Scalar")
def power_in_place(t: torch.Tensor, exponent: complex) -> torch.Tensor:
    """A bool to the power of a bool is a bool; the meta kernel says integer."""
    if t.dtype is torch.bool and isinstance(exponent, bool):
        return t if exponent else t.fill_(True)
    result: torch.Tensor = as_program(aten.pow_.Scalar)(t, exponent)
    return result
