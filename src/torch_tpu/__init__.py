"""A PyTorch backend for the device type `tpu`.

Importing this package, or PyTorch with the package installed, registers the device: `torch.ones(2, device="tpu")`.
The device module is `torch.tpu`. Submodules such as `torch_tpu.metrics` are imported when first named.
"""

from __future__ import annotations

import os
from types import ModuleType

from torch_tpu._loader import load

# XLA logs its device count at every start otherwise; read when jaxlib is loaded, which is later.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

__version__ = "0.1.0"
__all__ = ["__version__"]

load()


def __getattr__(name: str) -> ModuleType:
    import importlib
    import importlib.util

    qualified = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(qualified) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(qualified)
