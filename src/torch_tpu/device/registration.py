"""Registers the device: its place in PyTorch, `torch.tpu`, and the kernels needed before any operation runs."""

from __future__ import annotations

import torch

from torch_tpu.device import privateuse1


def register() -> None:
    """Makes `tpu` a device of this process.

    Imports neither jaxlib nor any lowering: the first operation does that.
    """
    if privateuse1.is_taken():
        raise RuntimeError(
            "PyTorch has room for one device that is not its own, and "
            f"{torch._C._get_privateuse1_backend_name()!r} is already registered. Uninstall one of the two packages, "
            "or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want."
        )
    from torch_tpu.device import (
        accelerator,
        autocast,
        autograd_kernels,
        fork,
        generator,
        index,
        libraries,
        module,
        patches,
    )
    from torch_tpu.eager import gate, hooks

    privateuse1.claim(module.build())
    generator.default_generator()
    hooks.take_random = generator.take
    hooks.check_index = index.check_index
    accelerator.install()
    autocast.install()
    autograd_kernels.install()
    patches.install()
    libraries.install()
    fork.install()
    gate.install()
