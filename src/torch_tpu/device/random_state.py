"""The random number functions of `torch.tpu`, which `torch.manual_seed`, `torch.random.fork_rng` and DTensor call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_tpu.device.device_index import get_device_index
from torch_tpu.device.generator import default_generator

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The state of the device's generator: 16 bytes on the CPU."""
    get_device_index(device, optional=True)
    return default_generator().get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators, of which a process has one."""
    return [get_rng_state()]


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Sets the state of the device's generator to one that `get_rng_state` returned."""
    get_device_index(device, optional=True)
    default_generator().set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the states that `get_rng_state_all` returned."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seeds the device's generator. `torch.manual_seed` does this too."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices' generators, of which a process has one."""
    manual_seed(seed)


def seed() -> None:
    """Seeds the device's generator with a number from the operating system."""
    default_generator().seed()


def seed_all() -> None:
    """Seeds all devices' generators with one number from the operating system."""
    seed()


def initial_seed() -> int:
    """The seed of the device's generator."""
    return default_generator().initial_seed()
