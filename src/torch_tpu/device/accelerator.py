"""`torch.accelerator` for the device.

Its functions look their implementation up in `torch._C` when called. The C++ ones there need an allocator and streams
that a device written in Python can't give them, so they are replaced by name. PyTorch has one accelerator per process,
and it is `tpu` from the moment of registration, so nobody else's calls reach these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.device import memory, properties, streams
from torch_tpu.device.index import check_index
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function
from torch_tpu.patching.registry import Patch, optional


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
    return memory.nested_stats()


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
    emptyCache=memory.empty_cache,
    getDeviceStats=_device_stats,
    resetAccumulatedStats=memory.reset_accumulated_memory_stats,
    resetPeakStats=memory.reset_peak_memory_stats,
    getMemoryInfo=memory.mem_get_info,
)
_replaced(
    "accelerator: capability",
    "torch.accelerator knows the device's dtypes",
    getDeviceCapability=_device_capability,
)
