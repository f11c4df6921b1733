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

from torch_tpu import ops
from torch_tpu.eager import gate
from torch_tpu.eager.kernels import HANDWRITTEN, program
from torch_tpu.eager.memory import host_metadata_kernel
from torch_tpu.eager.operator import Operator
from torch_tpu.eager.out import OutKernel
from torch_tpu.ops import derived
from torch_tpu.ops.registry import decomposes_here
from torch_tpu.ops.schema import signature
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
    "torch_tpu.eager.deviations",
    "torch_tpu.eager.host_kernels",
    "torch_tpu.eager.observer",
)

# Composite kernels that are right for PyTorch's own devices only: they refuse others, write to their memory, or take an
# `out=` that these refuse.
_NAMES_ITS_DEVICES = frozenset(
    {
        "aten::_stack.out",
        "aten::addr.out",
        "aten::all.dims_out",
        "aten::any.dims_out",
        "aten::mode.values",
        "aten::range.out_",
    }
)
# `out=` forms of composite operators that call it in turn.
_CALLED_BY_ITS_TWIN = frozenset({"aten::sspaddmm.out"})

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
    ops.load()
    for module in HANDWRITTEN_MODULES:
        importlib.import_module(module)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::", "tpu::", "prims::")) and not _has_kernel(name, "PrivateUse1"):
            kernel = kernel_for(name)
            if kernel is not None:
                # PyTorch calls a bound method sooner than an object that can be called.
                function = kernel.__call__ if isinstance(kernel, Operator) else kernel
                _library(name.partition("::")[0]).impl(name.partition("::")[2], function, "PrivateUse1")


_libraries: dict[str, torch.library.Library] = {"aten": gate.library}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


def kernel_for(name: str) -> Callable[..., Any] | None:
    """The kernel for "aten::name.overload", or None to leave the overload to PyTorch's composite kernel."""
    handwritten = HANDWRITTEN.get(name.partition("::")[2]) if name.startswith("aten::") else None
    if handwritten is not None:
        return handwritten
    func = _overload(name)
    if func is None:
        return None
    if _has_kernel(name, "CompositeImplicitAutograd") and not (
        _has_kernel(name, "Autograd") and derived.lowering(func)
    ):
        # Taking over a composite operator takes its derivative away, unless it has a formula besides.
        return None
    sig = signature(func)
    own = derived.lowering(func) is not None or derived.foreach_element(func) is not None or decomposes_here(func)
    if own and not sig.is_out:
        return program(func)
    if _has_kernel(name, "CompositeExplicitAutograd") and name not in _NAMES_ITS_DEVICES:
        return None
    if sig.is_out:
        twin = derived.functional(func)
        return program(func) if twin is None or name in _CALLED_BY_ITS_TWIN else OutKernel(func, twin)
    if not _has_kernel(name, "CPU") and not _has_kernel(name, "CompositeExplicitAutogradNonFunctional"):
        return None
    return host_metadata_kernel(func) if sig.is_view else program(func)
