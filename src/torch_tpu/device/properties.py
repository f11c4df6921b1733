"""What the device is: name, memory, capability and dtypes, as `torch.tpu` and `torch.accelerator` report them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu.device.device_index import DEVICE_COUNT, get_device_index

__all__ = [
    "current_device",
    "device_count",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "set_device",
]

SUPPORTED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of the device.

    Attributes:
        name: The TPU generation, such as "TPU v5e". A platform that is no TPU passes for one of them, because
            libraries refuse other names; `platform` tells.
        platform: PJRT's name of the platform: "tpu", "cpu", or another plugin's.
        total_memory: Bytes of device memory; on XLA:CPU those of the host.
        multi_processor_count: Always 1: a program runs on the whole device.
    """

    name: str
    platform: str
    total_memory: int
    multi_processor_count: int = 1


@functools.cache
def _properties() -> DeviceProperties:
    from torch_tpu.runtime import memory_limits, platform, process_client

    chosen = platform.choose(os.environ)
    # A stand-in's name does not depend on the device, so asking for it starts no client.
    generation = chosen.stand_in or chosen.generation(process_client.client().device_kind)
    memory = memory_limits.host_memory()[1] if chosen.name == "cpu" else generation.hbm_bytes_per_device
    return DeviceProperties(generation.name, chosen.name, memory)


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Properties of the device: name, platform, memory."""
    get_device_index(device, optional=True)
    return _properties()


def get_device_name(device: Any = None) -> str:
    """The TPU generation, such as "TPU v5e"; see `DeviceProperties.name` about platforms that are no TPU."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The TPU generation as (number, 0): (5, 0) for "TPU v5e"."""
    digits = re.search(r"\d+", get_device_name(device))
    return (int(digits.group()), 0) if digits else (0, 0)


def is_available() -> bool:
    """Whether the device can be used. Without a TPU, XLA:CPU runs the programs, so this depends on jaxlib."""
    return importlib.util.find_spec("jaxlib") is not None


def is_initialized() -> bool:
    """Always True: there is nothing to set up before the first use, and PyTorch only skips work when this is False."""
    return True


def device_count() -> int:
    """The number of devices this process drives: one."""
    return DEVICE_COUNT if is_available() else 0


def current_device() -> int:
    """The index of the current device: 0."""
    return 0


def set_device(device: Any) -> None:
    """Accepts the one device under any name it has (`tpu`, `tpu:0`, `tpu:LOCAL_RANK`, 0), and nothing else."""
    get_device_index(device, optional=True)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is the matrix unit's own format."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes `torch.autocast("tpu")` can cast to."""
    # Every autocast region asks this before it starts, which makes it the moment to register the casts.
    from torch_tpu.device import autocast

    autocast.install_casts()
    return [torch.bfloat16, torch.float16, torch.float32]
