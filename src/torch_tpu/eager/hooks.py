"""What upper layers provide to kernels: the generator's state, and the check for a forked process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _no_generator(generator: Any, count: int) -> tuple[int, int]:
    raise RuntimeError("the device's random generator is not set up; `import torch_tpu` first")


# take(generator or None, count) -> (seed, offset): advances the generator by `count` 32-bit words.
take_random: Callable[[Any, int], tuple[int, int]] = _no_generator
# Set in a forked child: raises the error that tells the user to use spawn.
forked: Callable[[], None] | None = None
