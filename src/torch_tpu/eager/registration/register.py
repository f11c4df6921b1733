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
from torch_tpu.eager.dispatch.operator import Operator, as_program
from torch_tpu.eager.dispatch.out_form import OutKernel
from torch_tpu.eager.kernel_table import HANDWRITTEN, library
from torch_tpu.eager.kernels.empty_view_resize import host_metadata_kernel
from torch_tpu.ops.core import derived
from torch_tpu.ops.core.registry import decomposes_here
from torch_tpu.ops.core.schema import signature
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
    "torch_tpu.eager.kernels.host_only",
    "torch_tpu.eager.kernels.fake_quantize_observer",
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
    ops.load()
    for module in HANDWRITTEN_MODULES:
        importlib.import_module(module)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::", "tpu::", "prims::")) and not _has_kernel(name, "PrivateUse1"):
            kernel = kernel_for(name)
            if kernel is not None:
                # PyTorch calls a bound method sooner than an object that can be called.
                function = kernel.__call__ if isinstance(kernel, Operator) else kernel
                library(name.partition("::")[0]).impl(name.partition("::")[2], function, "PrivateUse1")


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
        return as_program(func)
    if _has_kernel(name, "CompositeExplicitAutograd") and name not in _NAMES_ITS_DEVICES:
        return None
    if sig.is_out:
        twin = derived.functional(func)
        return as_program(func) if twin is None or name in _CALLED_BY_ITS_TWIN else OutKernel(func, twin)
    if not _has_kernel(name, "CPU") and not _has_kernel(name, "CompositeExplicitAutogradNonFunctional"):
        return None
    return host_metadata_kernel(func) if sig.is_view else as_program(func)
