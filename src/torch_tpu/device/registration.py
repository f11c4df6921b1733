"""Registers the device: name, hooks, guard, `torch.tpu`, generator, kernels that PyTorch needs before any operation."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

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


def register() -> None:
    """Makes `tpu` a device of this process.

    Imports neither jaxlib nor any lowering: the first operation does that.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "tpu") or hasattr(torch, "tpu"):
        raise RuntimeError(
            f"PyTorch has room for one device that is not its own, and {name!r} is already registered. "
            "Uninstall one of the two packages, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want."
        )
    from torch_tpu.device import accelerator, autocast, autograd_kernels, fork, generator, module, patches
    from torch_tpu.eager import gate, hooks

    _setup_privateuseone_for_python_backend("tpu", module.build(), _hooks, _guard)
    generator.default_generator()
    hooks.take_random = generator.take
    accelerator.install()
    autocast.install()
    autograd_kernels.install()
    patches.install()
    fork.install()
    gate.install()
