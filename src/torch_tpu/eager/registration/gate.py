"""Registration at load time: the few kernels through which any program reaches the device first.

Registering a kernel for every ATen overload takes 30 ms, and jaxlib as long again, so both wait until one
of these, or the boxed fallback, is called. (The fallback alone would not do: PyTorch can't call a Python fallback
while a TorchDispatchMode is active, see `register`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.eager import kernel_table

_GATES = (
    "empty.memory_format",
    "empty_strided",
    "_to_copy",
    "copy_",
    "_copy_from",
    "set_.source_Storage_storage_offset",
    "as_strided",
    "view",
)

_fallback_library = torch.library.Library("_", "IMPL")
_installed = False


def _gate(name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] | None = None

    @functools.wraps(_gate)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            from torch_tpu.eager.registration import register

            register.install()
            kernel = kernel_table.HANDWRITTEN[name]
        return kernel(*args, **kwargs)

    return run


def _first_call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback: registers everything, then calls the operator again.

    An operator that still has no kernel is one of another library, which may have a kernel for the CPU.
    """
    from torch_tpu.eager.host import fallback
    from torch_tpu.eager.registration import register

    register.install()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "PrivateUse1"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
            return fallback.run_on_cpu(func, args, kwargs, "its library has a CPU kernel, but none for the tpu device")
        raise NotImplementedError(
            f"{func} is not implemented for the tpu device, and has no CPU kernel to fall back to. "
            "Move its inputs to the CPU with .cpu()."
        )
    return func(*args, **kwargs)


def install() -> None:
    """Registers the gates; cheap, imports nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for name in _GATES:
        kernel_table.library("aten").impl(name, _gate(name), "PrivateUse1")
    _fallback_library.fallback(_first_call, "PrivateUse1")
