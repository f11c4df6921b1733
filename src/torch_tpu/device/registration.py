"""Registers the device: its place in PyTorch, `torch.tpu`, and the kernels needed before any operation runs."""

from __future__ import annotations

import torch

from torch_tpu.device import privateuse1
from torch_tpu.patching import patch_registry


def register() -> None:
    """Makes `tpu` a device of this process.

    Imports neither jaxlib nor any lowering: the first operation does that.

    Raises:
        PatchError: a change to PyTorch that the device can't do without does not fit; nothing was changed.
    """
    if privateuse1.is_taken():
        raise RuntimeError(
            "PyTorch has room for one external device (PrivateUse1), and "
            f"{torch._C._get_privateuse1_backend_name()!r} is already registered. Uninstall one of the two packages, "
            "or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want."
        )
    from torch_tpu.device import patches  # noqa: F401  (declares what is required)

    # The modules below use PyTorch's private objects when they are imported.
    patch_registry.check_required()
    from torch_tpu import hooks
    from torch_tpu.device import (  # (declare the others)
        accelerator,  # noqa: F401
        autocast,
        autograd_kernels,
        compile_patches,  # noqa: F401
        device_index,
        fork,
        generator,
        libraries,  # noqa: F401
        nested,
        stream_guard,  # noqa: F401
        unsupported_tensors,
    )
    from torch_tpu.eager.registration import gate

    patch_registry.apply_all()
    generator.default_generator()
    hooks.take_random = generator.take
    hooks.check_index = device_index.check_index
    autocast.install()
    autograd_kernels.install()
    unsupported_tensors.install()
    nested.install()
    fork.install()
    gate.install()
