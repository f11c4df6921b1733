"""What upper layers provide to kernels: the generator's state, device indices, and the check for a forked process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _no_generator(generator: Any, count: int) -> tuple[int, int]:
    raise RuntimeError("the device's random generator is not set up; `import torch_tpu` first")


# take(generator or None, count) -> (seed, offset): advances the generator by `count` 32-bit words.
take_random: Callable[[Any, int], tuple[int, int]] = _no_generator
# Set in a forked child: raises the error that tells the user to use spawn.
forked: Callable[[], None] | None = None


def _no_indices(index: int | None) -> int:
    raise RuntimeError("the device is not set up; `import torch_tpu` first")


# Raises for an index other than 0 that does not name this process's device either.
check_index: Callable[[int | None], int] = _no_indices


# Runs what has been recorded and not yet run, and says why; None where nothing ever was.
flush: Callable[[str], None] | None = None


def _builds_nothing() -> bool:
    return False


# Whether a program is being traced in this thread. The other way round: `plan` sets it, upper layers ask.
traces: Callable[[], bool] = _builds_nothing


def check_device(device: torch.device | None) -> None:
    """Raises for an index this process has no device for."""
    if device is not None and device.index:
        check_index(device.index)
