"""An exception in a hook of backward must reach the user, not end the process.

While a hook's exception travels out of autograd's engine, C++ puts the current stream back: a virtual function of the
device's guard, which asks the guard's Python half for its device type. Python refuses a call while an exception is on
its way, C++ gets a second exception, and `std::terminate` ends the process. The device has one stream, so there is
nothing to put back: the guard's entry for that function is replaced by the CPU guard's, which does nothing.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import torch

_HEADER = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_WORD = ctypes.sizeof(ctypes.c_void_p)
# C++ reads the table as long as the process lives.
_tables: list[ctypes.Array[ctypes.c_void_p]] = []


def virtual_functions() -> list[str]:
    """The guard's virtual functions in the order of their entries, from the header that comes with torch."""
    interface = _HEADER.read_text().partition("struct C10_API DeviceGuardImplInterface")[2].partition("\n};")[0]
    return re.findall(r"^ +virtual [\w:* ]+?[ *](~?\w+)\(", interface, re.MULTILINE)


def ignore_streams() -> bool:
    """Replaces the entry; False where this torch is laid out otherwise, and nothing was changed."""
    if not sys.platform.startswith("linux") or _WORD != 8:
        return False
    try:
        functions = virtual_functions()
        entry = functions.index("exchangeStream")
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 32).in_dll(library, _REGISTRY)
    except (OSError, ValueError):
        return False
    cpu, own = (guards[int(kind)] for kind in (_device_type("CPU"), _device_type("PrivateUse1")))
    if functions[0] != "type" or not cpu or not own:
        return False
    # Two words before the first entry belong to the table, and the destructor has two entries.
    size = 2 + len(functions) + 1
    old = ctypes.c_void_p.from_address(own)
    table = (ctypes.c_void_p * size).from_buffer_copy(ctypes.string_at((old.value or 0) - 2 * _WORD, size * _WORD))
    no_op = (ctypes.c_void_p * len(functions)).from_address(ctypes.c_void_p.from_address(cpu).value or 0)
    table[2 + entry] = no_op[entry]
    _tables.append(table)
    old.value = ctypes.addressof(table) + 2 * _WORD
    return True


def _device_type(name: str) -> int:
    return int(getattr(torch._C._autograd.DeviceType, name))
