"""The device buffers of scalars and of where views start; recent ones are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_tpu.hlo import types
from torch_tpu.recent import Recent
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.process_client import client

scalar_buffers: Recent[Any, Buffer] = Recent(4096)
start_buffers: Recent[tuple[int, ...], Buffer] = Recent(16384)


def scalar_buffer(value: Any, dtype: torch.dtype) -> Buffer:
    """A 0-d device buffer of a number; recent ones are kept."""
    key = (dtype, value if value else str(value))  # 0.0 and -0.0 are equal but not the same
    found = scalar_buffers.find(key)
    if found is None:
        with np.errstate(over="ignore"):
            found = scalar_buffers.keep(key, client().put(np.asarray(value, types.NUMPY[dtype])))
    return found


def starts_buffer(starts: tuple[int, ...]) -> Buffer:
    found = start_buffers.find(starts)
    return start_buffers.keep(starts, client().put(np.asarray(starts, np.int32))) if found is None else found


def clear() -> None:
    """Forgets them all."""
    scalar_buffers.clear()
    start_buffers.clear()
