"""`torch.accelerator` for the device.

Its functions look their implementation up in `torch._C` when called. The C++ ones there need an allocator and streams
that a device written in Python can't give them, so they are replaced by name. PyTorch has one accelerator per process,
and it is `tpu` from the moment of registration, so nobody else's calls reach these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.device import memory_statistics, no_allocator, properties, streams
from torch_tpu.device.device_index import check_index
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function
from torch_tpu.patching.patch_registry import Patch, optional


def _set_device_index(index: int) -> None:
    # A negative index means "leave it", as for every accelerator.
    if index >= 0:
        check_index(index)


def _exchange_device(index: int) -> int:
    _set_device_index(index)
    return 0


def _device_capability(index: int) -> dict[str, Any]:
    check_index(index)
    return {"supported_dtypes": set(properties.SUPPORTED_DTYPES)}


def _device_stats(index: int) -> dict[str, Any]:
    check_index(index)
    return memory_statistics.nested_stats()


def _replaced(name: str, feature: str, **functions: Callable[..., Any]) -> Patch:
    """Declares the patch of functions of `torch._C` that are called `_accelerator_` and these names."""
    by_name = {f"_accelerator_{short}": replacement for short, replacement in functions.items()}

    @optional(name, feature, *(function(f"torch._C:{full}") for full in by_name))
    def replace(changes: Changes) -> None:
        for full, replacement in by_name.items():
            changes.set(torch._C, full, replacement)

    return replace


_replaced(
    "accelerator: index",
    "torch.accelerator knows that this process has one device",
    setDeviceIndex=_set_device_index,
    exchangeDevice=_exchange_device,
    maybeExchangeDevice=_exchange_device,
)
_replaced(
    "accelerator: streams",
    "torch.accelerator waits for the device and has its streams",
    synchronizeDevice=streams.synchronize,
    getStream=streams.current_stream,
    setStream=streams.set_stream,
)
_replaced(
    "accelerator: memory",
    "torch.accelerator counts and frees the device's memory",
    isAllocatorInitialized=lambda: True,
    emptyCache=memory_statistics.empty_cache,
    emptyHostCache=memory_statistics.empty_cache,
    getDeviceStats=_device_stats,
    resetAccumulatedStats=memory_statistics.reset_accumulated_memory_stats,
    resetPeakStats=memory_statistics.reset_peak_memory_stats,
    getMemoryInfo=memory_statistics.mem_get_info,
)
_replaced(
    "accelerator: hooks",
    "PyTorch's C++ code can ask for the accelerator's current device and their number",
    hooks_device_count=properties.device_count,
    hooks_get_current_device=properties.current_device,
    hooks_set_current_device=_set_device_index,
    hooks_exchange_device=_exchange_device,
    hooks_maybe_exchange_device=_exchange_device,
)
_replaced(
    "accelerator: capability",
    "torch.accelerator knows the device's dtypes",
    getDeviceCapability=_device_capability,
)


@optional(
    "accelerator: snapshot",
    "torch.accelerator.memory's snapshot raises an error that names what to use instead",
    function("torch.accelerator.memory:_snapshot", "device"),
)
def refuse_snapshot(changes: Changes) -> None:
    # Elsewhere this calls CUDA's.
    changes.set(torch.accelerator.memory, "_snapshot", no_allocator.REFUSALS["_snapshot"])
