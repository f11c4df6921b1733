"""Registers a kernel for every ATen overload the device answers itself.

Per overload rather than by the boxed fallback, because a Python fallback can't run while a TorchDispatchMode is active
(FakeTensorMode inside torch.compile, for one). Functional, in-place and `out=` overloads are each registered: PyTorch's
structured defaults would otherwise turn `add` into `empty_strided` and `add.out`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.eager import overload_table
from torch_tpu.eager.dispatch.operator import Operator, program_named
from torch_tpu.eager.dispatch.out_form import new_out_kernel
from torch_tpu.eager.kernel_table import HANDWRITTEN, library
from torch_tpu.eager.kernels.empty_view_resize import host_metadata_kernel
from torch_tpu.eager.overload_table import Row
from torch_tpu.patching import patch_registry

HANDWRITTEN_MODULES = (
    "torch_tpu.eager.kernels.empty_view_resize",
    "torch_tpu.eager.kernels.copy",
    "torch_tpu.eager.kernels.ranges",
    "torch_tpu.eager.kernels.ctc_lengths",
    "torch_tpu.eager.kernels.scalar_range",
    "torch_tpu.eager.kernels.random_arguments",
    "torch_tpu.eager.kernels.mask_indexing",
    "torch_tpu.eager.kernels.in_place_exceptions",
    "torch_tpu.eager.kernels.dynamic_size",
    "torch_tpu.eager.kernels.recurrent_layers",
    "torch_tpu.eager.kernels.least_squares",
    "torch_tpu.eager.kernels.cpu_warnings",
    "torch_tpu.eager.kernels.host_only",
    "torch_tpu.eager.kernels.fake_quantize_observer",
)

_lock = threading.RLock()
_done = False
_installing = False
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def install() -> None:
    """Registers everything once; a second thread waits until the first is through."""
    global _done, _installing
    # Here, not where the device is registered: who only uses the CPU hears nothing of patches that are off.
    patch_registry.device_is_used()
    with _lock:
        if _done or _installing:
            return
        _installing = True
        try:
            _register_all()
            _done = True
        finally:
            _installing = False


def _register_all() -> None:
    rows = overload_table.rows()
    for module in HANDWRITTEN_MODULES:
        importlib.import_module(module)
    for name, row in rows.items():
        kernel = _kernel(name, row)
        if kernel is not None and not _has_kernel(name, "PrivateUse1"):
            # PyTorch calls a bound method sooner than an object that can be called.
            function = kernel.__call__ if isinstance(kernel, Operator) else kernel
            library(name.partition("::")[0]).impl(name.partition("::")[2], function, "PrivateUse1")


def _kernel(name: str, row: Row) -> Callable[..., Any] | None:
    handwritten = HANDWRITTEN.get(name.partition("::")[2]) if name.startswith("aten::") else None
    if handwritten is not None or row.kind == overload_table.NONE:
        return handwritten
    if row.kind == overload_table.OUT:
        return new_out_kernel(name, row.twin)
    if row.kind == overload_table.VIEW:
        return host_metadata_kernel(overload_table.overload(name))
    return program_named(name, row)


def kernel_for(name: str) -> Callable[..., Any] | None:
    """The kernel for "aten::name.overload", or None to leave the overload to PyTorch's composite kernel."""
    row = overload_table.rows().get(name)
    return None if row is None else _kernel(name, row)
