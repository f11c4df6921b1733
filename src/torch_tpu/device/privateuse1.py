"""Claims PrivateUse1, PyTorch's dispatch key for an external device, and names it `tpu`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import a_class, function
from torch_tpu.patching.patch_registry import required

_claimed = False
_usable = False
# C++ keeps plain pointers to the hooks and the guard.
_kept: list[Any] = []


def is_taken() -> bool:
    """Whether another package has the place already."""
    name_of_place = getattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    return not _claimed and name_of_place() != "privateuseone"


@required(
    "registration",
    "the device has PyTorch's hooks and a device guard",
    function(
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend",
        *("rename", "backend_module", "hook", "device_guard"),
    ),
    function("torch._C:_get_privateuse1_backend_name"),
    a_class("torch._C._acc:PrivateUse1Hooks"),
    a_class("torch._C._acc:DeviceGuard"),
)
def registration(changes: Changes) -> None:
    # Stays when other patches fail: C++ can't forget a device. `broken` puts another module in its place.
    from torch_tpu.device import tpu_module

    claim(tpu_module.build())


def claim(module: ModuleType, *, usable: bool = True) -> None:
    """Makes `tpu` a device with `module` as `torch.tpu`, in place of the module of an earlier call."""
    global _claimed, _usable
    _usable = usable
    if _claimed:
        torch.tpu = sys.modules["torch.tpu"] = module  # type: ignore[attr-defined]
        return
    _claimed = True
    if registration.problem():
        # What is public suffices for a device whose every operation raises.
        torch.utils.rename_privateuse1_backend("tpu")
        torch._register_device_module("tpu", module)
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _kept[:] = _hooks(), _guard()
    _setup_privateuseone_for_python_backend("tpu", module, *_kept)


def _hooks() -> Any:
    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return _usable

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return True

    return Hooks()


def _guard() -> Any:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()
