"""Device memory as `torch.tpu` and `torch.accelerator.memory` report it, in bytes.

PJRT allocates and frees without a cache between, so reserved memory is allocated memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch_tpu.device.device_index import get_device_index

__all__ = [
    "empty_cache",
    "get_allocator_backend",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
]


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors occupy."""
    get_device_index(device, optional=True)
    from torch_tpu.runtime import memory_counts

    return memory_counts.allocated()


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes in use at one time, programs' temporaries included, since the last reset of the peak."""
    get_device_index(device, optional=True)
    from torch_tpu.runtime import memory_counts

    return memory_counts.peak()


def memory_reserved(device: Any = None) -> int:
    """The same as `memory_allocated`."""
    return memory_allocated(device)


def max_memory_reserved(device: Any = None) -> int:
    """The same as `max_memory_allocated`."""
    return max_memory_allocated(device)


def nested_stats() -> dict[str, Any]:
    """All statistics in the nested form of `torch._C._accelerator_getDeviceStats`."""
    from torch_tpu.runtime import memory_counts

    counts = memory_counts.stats()
    in_use = {
        "current": counts["allocated"],
        "peak": counts["peak"],
        "allocated": counts["total"],
        "freed": counts["freed_total"],
    }
    stats: dict[str, Any] = {
        name: {"all": dict(in_use)} for name in ("active_bytes", "allocated_bytes", "reserved_bytes")
    }
    stats["num_alloc_retries"] = 0
    stats["num_device_alloc"] = counts["allocations"]
    stats["num_ooms"] = counts["out_of_memory"]
    return stats


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """The statistics of `memory_stats` as a dictionary of dictionaries."""
    get_device_index(device, optional=True)
    return nested_stats()


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """All statistics by dotted name, such as `active_bytes.all.peak`, as `torch.cuda.memory_stats` names them."""
    get_device_index(device, optional=True)
    flat: dict[str, Any] = {}
    for name, value in nested_stats().items():
        if isinstance(value, dict):
            flat.update((f"{name}.all.{metric}", count) for metric, count in value["all"].items())
        else:
            flat[name] = value
    return OrderedDict(sorted(flat.items()))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Makes the current use the peak."""
    get_device_index(device, optional=True)
    from torch_tpu.runtime import memory_counts

    memory_counts.reset_peak()


def reset_max_memory_allocated(device: Any = None) -> None:
    """The same as `reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Sets the historical totals (`allocated`, `freed`, the event counts) back to zero."""
    get_device_index(device, optional=True)
    from torch_tpu.runtime import memory_counts

    memory_counts.reset_accumulated()


def empty_cache() -> None:
    """Does nothing: no freed memory is held back."""


def get_allocator_backend() -> str:
    """Who allocates: "pjrt"."""
    return "pjrt"


def host_memory_stats() -> OrderedDict[str, Any]:
    """Empty: pinned host memory is ordinary memory here, and there is no pool of it."""
    return OrderedDict()


def reset_accumulated_host_memory_stats() -> None:
    """Does nothing: see `host_memory_stats`."""


def reset_peak_host_memory_stats() -> None:
    """Does nothing: see `host_memory_stats`."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The statistics as a table, followed by the buffers that take most memory.

    Args:
        abbreviated: Whether to leave out the buffers.
    """
    get_device_index(device, optional=True)
    from torch_tpu.device import properties
    from torch_tpu.runtime import memory_counts
    from torch_tpu.runtime.process_client import client

    counts = memory_counts.stats()
    free, total = mem_get_info()
    rows = (
        ("Allocated now", counts["allocated"]),
        ("Peak", counts["peak"]),
        ("Allocated in total", counts["total"]),
        ("Freed in total", counts["freed_total"]),
        ("Free on the device", free),
        ("Memory of the device", total),
    )
    lines = [f"Memory of {properties.get_device_name()} (platform {properties.get_device_properties().platform!r})"]
    lines += [f"  {name:<22}{size / 2**20:>14,.1f} MiB" for name, size in rows]
    lines += [f"  {'Allocations':<22}{counts['allocations']:>14,}"]
    lines += [f"  {'Out of memory':<22}{counts['out_of_memory']:>14,}"]
    if not abbreviated:
        lines += ["Largest buffers, by shape:", *(f"  {line}" for line in client().largest_live(10) or ["none"])]
    return "\n".join(lines)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of the device; on XLA:CPU those of the host."""
    get_device_index(device, optional=True)
    from torch_tpu.device import properties
    from torch_tpu.runtime import memory_limits

    described = properties.get_device_properties()
    if described.platform == "cpu":
        return memory_limits.host_memory()
    total = described.total_memory
    return max(0, total - memory_allocated()), total
