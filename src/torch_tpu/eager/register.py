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

from torch_tpu.eager import gate, kernel_table
from torch_tpu.eager.kernel_table import Row
from torch_tpu.eager.kernels import HANDWRITTEN, program_named
from torch_tpu.eager.memory import host_metadata_kernel
from torch_tpu.eager.operator import Operator
from torch_tpu.eager.out import new_out_kernel
from torch_tpu.patching import registry

HANDWRITTEN_MODULES = (
    "torch_tpu.eager.memory",
    "torch_tpu.eager.copy",
    "torch_tpu.eager.creation",
    "torch_tpu.eager.ctc",
    "torch_tpu.eager.numbers",
    "torch_tpu.eager.random",
    "torch_tpu.eager.indexing",
    "torch_tpu.eager.allowed",
    "torch_tpu.eager.dynamic",
    "torch_tpu.eager.recurrent",
    "torch_tpu.eager.least_squares",
    "torch_tpu.eager.host_kernels",
    "torch_tpu.eager.observer",
)

_lock = threading.RLock()
_done = False
_installing = False
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def install() -> None:
    """Registers everything once; a second thread waits until the first is through."""
    global _done, _installing
    # Here, not where the device is registered: who only uses the CPU hears nothing of patches that are off.
    registry.device_is_used()
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
    rows = kernel_table.rows()
    for module in HANDWRITTEN_MODULES:
        importlib.import_module(module)
    for name, row in rows.items():
        kernel = _kernel(name, row)
        if kernel is not None and not _has_kernel(name, "PrivateUse1"):
            # PyTorch calls a bound method sooner than an object that can be called.
            function = kernel.__call__ if isinstance(kernel, Operator) else kernel
            _library(name.partition("::")[0]).impl(name.partition("::")[2], function, "PrivateUse1")


_libraries: dict[str, torch.library.Library] = {"aten": gate.library}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _kernel(name: str, row: Row) -> Callable[..., Any] | None:
    handwritten = HANDWRITTEN.get(name.partition("::")[2]) if name.startswith("aten::") else None
    if handwritten is not None or row.kind == kernel_table.NONE:
        return handwritten
    if row.kind == kernel_table.OUT:
        return new_out_kernel(name, row.twin)
    if row.kind == kernel_table.VIEW:
        return host_metadata_kernel(kernel_table.overload(name))
    return program_named(name, row)


def kernel_for(name: str) -> Callable[..., Any] | None:
    """The kernel for "aten::name.overload", or None to leave the overload to PyTorch's composite kernel."""
    row = kernel_table.rows().get(name)
    return None if row is None else _kernel(name, row)
