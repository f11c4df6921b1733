"""`torch.accelerator` for the device.

Its functions look their implementation up in `torch._C` when called. The C++ ones there need an allocator and streams
that a device written in Python can't give them, so they are replaced by name. PyTorch has one accelerator per process,
and it is `tpu` from the moment of registration, so nobody else's calls reach these.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.device import memory, properties, streams
from torch_tpu.device.index import check_index


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


_IMPLEMENTATIONS = {
    "_accelerator_setDeviceIndex": _set_device_index,
    "_accelerator_exchangeDevice": _exchange_device,
    "_accelerator_maybeExchangeDevice": _exchange_device,
    "_accelerator_synchronizeDevice": streams.synchronize,
    "_accelerator_getStream": streams.current_stream,
    "_accelerator_setStream": streams.set_stream,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_emptyCache": memory.empty_cache,
    "_accelerator_getDeviceStats": _device_stats,
    "_accelerator_resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": memory.reset_peak_memory_stats,
    "_accelerator_getMemoryInfo": memory.mem_get_info,
    "_accelerator_getDeviceCapability": _device_capability,
}


def install() -> None:
    for name, implementation in _IMPLEMENTATIONS.items():
        setattr(torch._C, name, implementation)
