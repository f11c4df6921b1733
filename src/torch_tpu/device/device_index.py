"""Device indices. A process drives one device, `tpu:0`; several chips mean several processes."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE_COUNT = 1


def check_index(index: int | None) -> int:
    """The index of the one device, for an index that a caller asked for.

    The process's own `LOCAL_RANK` also names its device: programs written for one process per accelerator
    ask for `tpu:LOCAL_RANK`.

    Raises:
        RuntimeError: When `index` names a device that this process does not drive.
    """
    if not index:
        return 0
    if str(index) == os.environ.get("LOCAL_RANK"):
        return 0
    raise RuntimeError(
        f"invalid device tpu:{index}: this process has one tpu device, tpu:0. Several devices are used by several "
        "processes (torchrun)."
    )


def get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index that `device` (an int, a string, a `torch.device`, an object with a device, or None) means.

    Args:
        device: What the caller named.
        optional: Whether None means the current device; otherwise None is an error.
        allow_cpu: Whether a CPU device is accepted and gives -1.
    """
    if device is None:
        if optional:
            return 0
        raise ValueError("Expected a torch.device with a specified index or an integer, but got: None")
    if isinstance(device, int):
        return 0 if device < 0 else check_index(device)
    if not isinstance(device, (str, torch.device)):
        device = device.device
    device = torch.device(device)
    if device.type == "cpu" and allow_cpu:
        return -1
    if device.type != "tpu":
        raise ValueError(f"Expected a 'tpu' device, but got: {device}")
    return check_index(device.index)
