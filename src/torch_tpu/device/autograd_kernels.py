"""Operations that are PyTorch's own plumbing rather than computation, at the keys where PyTorch asks for them."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.device import sdpa

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl("_has_compatible_shallow_copy_type", _has_compatible_shallow_copy_type, key)
        _library.impl("scaled_dot_product_attention", sdpa.scaled_dot_product_attention, key)
    _library.impl("_fused_sdp_choice", sdpa.fused_sdp_choice, "PrivateUse1")
    _library.impl("_efficientzerotensor", _efficientzerotensor, "PrivateUse1")
    _library.impl("is_pinned", is_pinned, "PrivateUse1")


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


# Host memory needs no pinning, because PJRT copies from any. What asks for it (DataLoader, `Tensor.pin_memory`) gets
# an ordinary copy that says it is pinned; for another device's memory the call goes on to PyTorch.

_CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _is_foreign(device: Any) -> bool:
    return device is not None and torch.device(device).type != "tpu"


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if _is_foreign(device):
        return torch.ops.aten._pin_memory.default.redispatch(_CUDA_KEYS, self, device)
    pinned = self.clone()
    pinned.untyped_storage()._pinned_for_tpu = True  # type: ignore[attr-defined]
    return pinned


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    if _is_foreign(device):
        return torch.ops.aten.is_pinned.default.redispatch(_CUDA_KEYS, self, device)
    return getattr(self.untyped_storage(), "_pinned_for_tpu", False)
