"""Random number generators of the device: a seed and an offset into a counter-based stream.

An operation that draws n numbers gets (seed, offset) and moves the offset on, so that what it draws is a function of
the two alone, whichever program computes it. `torch.distributed.tensor` relies on the 16-byte state for that.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from typing import Any

import torch

from torch_tpu.device.class_replacement import metaclass_of
from torch_tpu.device.device_index import check_index

_CGenerator: Any = torch._C.Generator

# The seed of an unseeded generator, as on every PyTorch device.
DEFAULT_SEED = 67280421310721
_STATE = struct.Struct("<Qq")
# A program draws numbers four at a time.
_DRAW = 4

_lock = threading.Lock()
# A kernel is handed a fresh wrapper of the C++ generator, not the object the user holds; the address is the same.
_by_address: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


_GeneratorType: Any = metaclass_of(_CGenerator)


class _State:
    __slots__ = ("offset", "seed")

    def __init__(self, seed: int, offset: int) -> None:
        self.seed = seed
        self.offset = offset


class Generator(_CGenerator, metaclass=_GeneratorType):
    """`torch.Generator`: for `tpu` an object of this class, for any other device PyTorch's own generator."""

    _state: _State

    def __new__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        if device.type != "tpu":
            return _CGenerator(device)
        check_index(device.index)
        # C++ knows no generator for the device; around a CPU one it passes through any operation's arguments.
        generator = _CGenerator.__new__(cls, "cpu")
        generator._state = _State(DEFAULT_SEED, 0)
        with _lock:
            _by_address[generator._cdata] = generator
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        return torch.device("tpu", 0)

    def manual_seed(self, seed: int) -> Generator:
        with _lock:
            self._state.seed = _unsigned(seed)
            self._state.offset = 0
        return self

    def seed(self) -> int:
        """Seeds with a number from the operating system, and returns it."""
        # 53 bits, as on CUDA: a double holds it exactly.
        seed = int.from_bytes(os.urandom(8), "little") >> 11
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return self._state.seed

    def get_offset(self) -> int:
        return self._state.offset

    def set_offset(self, offset: int) -> None:
        if offset % _DRAW:
            raise RuntimeError(f"offset must be a multiple of {_DRAW}, but got {offset}")
        with _lock:
            self._state.offset = offset

    def get_state(self) -> torch.Tensor:
        """The state as 16 bytes on the CPU: the seed as uint64, then the offset as int64."""
        with _lock:
            packed = _STATE.pack(self._state.seed, self._state.offset)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).clone()

    def set_state(self, state: torch.Tensor) -> Generator:
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != _STATE.size:
            raise RuntimeError(f"RNG state is wrong size: expected {_STATE.size} bytes, but got {state.numel()}")
        seed, offset = _STATE.unpack(bytes(state.flatten().tolist()))
        with _lock:
            self._state.seed = seed
            self._state.offset = offset
        return self

    def clone_state(self) -> Generator:
        return _rebuild(self.get_state())

    def graphsafe_get_state(self) -> Generator:
        """A generator that shares this one's state: drawing from either moves both."""
        shared = Generator("tpu")
        shared._state = self._state
        return shared

    def graphsafe_set_state(self, other: Generator) -> Generator:
        self._state = other._state
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.get_state(),)


# The name under which users and pickles know the class.
Generator.__module__ = "torch"


def _rebuild(state: torch.Tensor) -> Generator:
    generator: Generator = Generator("tpu")
    return generator.set_state(state)


def _unsigned(seed: int) -> int:
    seed = int(seed)
    if not -(2**63) <= seed < 2**64:
        raise RuntimeError(
            "Overflow when unpacking long: a seed must be in [-0x8000_0000_0000_0000, 0xffff_ffff_ffff_ffff]"
        )
    return seed % 2**64


_default: Generator | None = None


def default_generator() -> Generator:
    """The device's generator, used by random operations that are given none."""
    global _default
    if _default is None:
        # Made by `registration`, before threads: the name of the device does not exist when this file is imported.
        _default = Generator("tpu")
    return _default


def take(generator: Any, numel: int) -> tuple[int, int]:
    """Reserves `numel` random numbers: the seed, and the offset of the first, which moves on by a multiple of 4.

    Args:
        generator: What an operation was given as `generator`; None means the device's own.
        numel: How many numbers it draws.
    """
    if generator is None:
        owner: Generator | None = _default
    else:
        owner = _by_address.get(generator._cdata)
    if owner is None:
        raise RuntimeError(f"Expected a 'tpu' device type for generator but found '{generator.device.type}'")
    with _lock:
        state = owner._state
        offset = state.offset
        state.offset = offset + (numel + _DRAW - 1) // _DRAW * _DRAW
        return state.seed, offset
