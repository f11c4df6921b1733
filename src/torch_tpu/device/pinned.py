"""Pinned host memory. Here it is ordinary memory, because PJRT copies from any host memory.

`Tensor.pin_memory` and DataLoader reach operators, which make an ordinary copy that says it is pinned.
`torch.empty(pin_memory=True)` and its like ask C++ for an allocator through a virtual function of the device's hooks,
which Python can't override. The function's entry is replaced by one that returns an allocator like the CPU's own, but
another object, by which its storages are known.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import torch

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import operator
from torch_tpu.patching.patch_registry import optional

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = Path(torch.__file__).parent / "include/ATen/detail/AcceleratorHooksInterface.h"
# Two words lie before a table of virtual functions. That of the hooks has fewer entries; a storage has more words.
_BEFORE, _ENTRIES, _STORAGE_WORDS = 2, 32, 12

# C++ keeps pointers to what stands here.
_kept: list[Any] = []
# The word of a C++ storage that names its allocator, and what stands there if that is ours.
_place_of_allocator: tuple[int, int] | None = None


_CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _is_foreign(device: Any) -> bool:
    """Whether the memory of another device is meant: such a call goes on to PyTorch."""
    return device is not None and torch.device(device).type != "tpu"


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if _is_foreign(device):
        return torch.ops.aten._pin_memory.default.redispatch(_CUDA_KEYS, self, device)
    pinned = self.clone()
    pinned.untyped_storage()._pinned_for_tpu = True  # type: ignore[attr-defined]
    return pinned


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    if _is_foreign(device):
        return torch.ops.aten.is_pinned.default.redispatch(_CUDA_KEYS, self, device)
    storage = self.untyped_storage()
    if storage.device.type != "cpu":
        return False
    return getattr(storage, "_pinned_for_tpu", False) or _is_from_allocator(storage)


def _is_from_allocator(storage: torch.UntypedStorage) -> bool:
    if _place_of_allocator is None:
        return False
    offset, allocator = _place_of_allocator
    return ctypes.c_void_p.from_address(storage._cdata + offset).value == allocator


@optional(
    "pinned allocator",
    "torch.empty(pin_memory=True) and similar functions make tensors for which is_pinned() is True",
    operator("aten.empty.memory_format", "size", "dtype", "layout", "device", "pin_memory"),
)
def give_allocator(changes: Changes) -> None:
    """Replaces the entry, and looks whether PyTorch then asks it.

    Raises:
        RuntimeError, OSError, ValueError, AttributeError: this torch is laid out otherwise; nothing remains changed.
    """
    global _place_of_allocator
    if not sys.platform.startswith("linux") or _WORD != 8:
        raise RuntimeError("the layout of the device's hooks is known only for 64-bit Linux")
    entry = _entry_of("getPinnedMemoryAllocator")
    allocator = _allocator()
    table = ctypes.c_void_p.from_address(_hooks())
    old, size = table.value or 0, _BEFORE + _ENTRIES
    copy = (ctypes.c_void_p * size).from_buffer_copy(ctypes.string_at(old - _BEFORE * _WORD, size * _WORD))
    address = ctypes.addressof(allocator)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda hooks: address)
    copy[_BEFORE + entry] = ctypes.cast(function, ctypes.c_void_p)
    _kept.extend((allocator, copy, function))
    changes.on_undo(lambda: setattr(table, "value", old))
    table.value = ctypes.addressof(copy) + _BEFORE * _WORD
    _place_of_allocator = _found_in_storages(address)


def _entry_of(name: str) -> int:
    """Which entry of the table a virtual function has, from the header that comes with torch."""
    interface = _HEADER.read_text().partition("struct TORCH_API AcceleratorHooksInterface")[2].partition("\n};")[0]
    functions = re.findall(r"^ +virtual (?:[\w:*& ]+?[ *&])?(~?\w+)\(", interface, re.MULTILINE)
    if not functions[0].startswith("~"):  # A destructor has two entries.
        raise ValueError(name)
    return functions.index(name) + 1


def _hooks() -> int:
    """The address of the device's hooks."""
    find = _library_of_torch("libtorch_cpu.so")._ZN2at6detail19getPrivateUse1HooksEv
    find.restype = ctypes.c_void_p
    return int(find())


def _allocator() -> ctypes.Array[ctypes.c_void_p]:
    """An object of the class of the CPU's allocator, which has nothing but a table of functions."""
    core = _library_of_torch("libc10.so")
    functions = ctypes.addressof(ctypes.c_void_p.in_dll(core, "_ZTVN3c1019DefaultCPUAllocatorE")) + _BEFORE * _WORD
    return (ctypes.c_void_p * 2)(functions, None)


def _found_in_storages(allocator: int) -> tuple[int, int]:
    """Where a storage names its allocator: where one of ours and another differ in just that."""
    find = _library_of_torch("libc10.so")._ZN3c1015GetCPUAllocatorEv
    find.restype = ctypes.c_void_p
    ours, other = torch.empty(1, device="cpu", pin_memory=True), torch.empty(1, device="cpu")
    words = [(ctypes.c_void_p * _STORAGE_WORDS).from_address(t.untyped_storage()._cdata) for t in (ours, other)]
    for n, pair in enumerate(zip(*words, strict=True)):
        if pair == (allocator, find()):
            return n * _WORD, allocator
    raise RuntimeError("a storage does not name the allocator that was given")


def _library_of_torch(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
