"""Makes the backend `tpu_dist` known to `torch.distributed`; what it consists of is imported with the first group."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch_tpu.patching.post_import import after_import

# Both are public names of the backend. The first is what `init_process_group()` chooses for the device.
NAMES = ("tpu_dist", "tpu")


def install() -> None:
    """Registers the backend, now or when `torch.distributed` is imported."""
    after_import("torch.distributed.distributed_c10d", _register)


def _register(module: ModuleType) -> None:
    backend: Any = module.Backend
    for name in NAMES:
        if name not in backend.backend_list:
            backend.register_backend(name, _create, extended_api=True, devices=["tpu"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from torch_tpu.distributed import kernels
    from torch_tpu.distributed.group import create

    kernels.install()
    return create(options, backend_options)
