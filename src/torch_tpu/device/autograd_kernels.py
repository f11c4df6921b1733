"""Operations that are PyTorch's own plumbing rather than computation, at the keys where PyTorch asks for them."""

from __future__ import annotations

import torch

from torch_tpu.device import pinned, sdpa

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl("_has_compatible_shallow_copy_type", _has_compatible_shallow_copy_type, key)
        _library.impl("scaled_dot_product_attention", sdpa.scaled_dot_product_attention, key)
    _library.impl("_fused_sdp_choice", sdpa.fused_sdp_choice, "PrivateUse1")
    _library.impl("_efficientzerotensor", _efficientzerotensor, "PrivateUse1")
    _library.impl("is_pinned", pinned.is_pinned, "PrivateUse1")


def _has_compatible_shallow_copy_type(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `self.data = other` is possible, so that `Module.to` keeps its Parameter objects.

    PyTorch's own answer knows only its own devices. Moving between CPU and `tpu` is possible in both directions.
    """
    return self.layout == other.layout


def _efficientzerotensor(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Plain zeros: the key of a tensor without memory can't be set from Python, and forward-mode AD needs one."""
    return torch.zeros(size, dtype=dtype, device=device)
