"""A PyTorch backend for the device type `tpu`.

Importing this package, or PyTorch with the package installed, registers the device: `torch.ones(2, device="tpu")`.
The device module is `torch.tpu`. Submodules such as `torch_tpu.metrics` are imported when first named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_tpu._loader import load

# XLA logs its device count at every start otherwise; read when jaxlib is loaded, which is later.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

__version__ = "0.1.0"
__all__ = ["__version__", "export", "plan"]

if TYPE_CHECKING:
    from torch_tpu.compile.exported import Exported
    from torch_tpu.planner.figures import Plan

load()


def export(module_or_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Exported:
    """One call of a module or function as a StableHLO module for use outside PyTorch: `torch_tpu.compile.export`."""
    from torch_tpu.compile import FEATURE
    from torch_tpu.patching.patch_registry import needing_private_names

    with needing_private_names(FEATURE):
        from torch_tpu.compile.export import export as make

    return make(module_or_fn, *args, **kwargs)


def plan(fn: Callable[..., Any], *args: Any, target: str, **options: Any) -> Plan:
    """The memory and time that calls of a function take on a TPU; no TPU is needed. See `torch_tpu.planner.plan`."""
    from torch_tpu.planner import plan as make

    return make(fn, *args, target=target, **options)


def __getattr__(name: str) -> ModuleType:
    import importlib
    import importlib.util

    qualified = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(qualified) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(qualified)
