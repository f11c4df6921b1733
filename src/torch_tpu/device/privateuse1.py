"""Takes PyTorch's one place for a device that is not its own, and names it `tpu`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torch_tpu.device import stream_guard

_acc = torch._C._acc


class _Hooks(_acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _Guard(_acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


# C++ keeps plain pointers to these two.
_hooks = _Hooks()
_guard = _Guard()
_claimed = False


def is_taken() -> bool:
    """Whether another package has the place already."""
    return not _claimed and torch._C._get_privateuse1_backend_name() != "privateuseone"


def claim(module: ModuleType) -> None:
    """Makes `tpu` a device with `module` as `torch.tpu`, in place of the module of an earlier call."""
    global _claimed
    if _claimed:
        torch.tpu = sys.modules["torch.tpu"] = module  # type: ignore[attr-defined]
        return
    _claimed = True
    _setup_privateuseone_for_python_backend("tpu", module, _hooks, _guard)
    stream_guard.ignore_streams()
