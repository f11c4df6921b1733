"""An exception in a backward hook must reach the user, not end the process.

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

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import a_class
from torch_tpu.patching.patch_registry import Moment, optional

_HEADER = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_FUNCTION = "exchangeStream"
_MANGLED = f"{len(_FUNCTION)}{_FUNCTION}"
_WORD = ctypes.sizeof(ctypes.c_void_p)
# Two words lie before the first entry; the destructor, declared last, has two entries.
_BEFORE, _DESTRUCTORS = 2, 2
# C++ reads the table as long as the process lives.
_tables: list[ctypes.Array[ctypes.c_void_p]] = []


def virtual_functions() -> list[str]:
    """The guard's virtual functions in the order of their entries, from the header that comes with torch."""
    interface = _HEADER.read_text().partition("struct C10_API DeviceGuardImplInterface")[2].partition("\n};")[0]
    return re.findall(r"^ +virtual [\w:* ]+?[ *](~?\w+)\(", interface, re.MULTILINE)


@optional(
    "stream guard",
    "an exception in a hook of backward reaches the user instead of ending the process",
    a_class("torch._C._autograd:DeviceType", "CPU", "PrivateUse1"),
    moment=Moment.FIRST_USE,
)
def ignore_streams(changes: Changes) -> None:
    """Replaces the entry, where the header's order is that of the symbols in both tables.

    Raises:
        RuntimeError, OSError, ValueError: this torch is laid out otherwise; nothing was changed.
    """
    from torch_tpu.device.symbols import symbol_at

    if not sys.platform.startswith("linux") or _WORD != 8:
        raise RuntimeError("the layout of the device guard is known only for 64-bit Linux")
    functions = virtual_functions()
    entry = functions.index(_FUNCTION)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, _REGISTRY)
    cpu, own = (guards[_device_type(kind)] for kind in ("CPU", "PrivateUse1"))
    if not cpu or not own:
        raise RuntimeError("no device guards are registered")
    pointer = ctypes.c_void_p.from_address(own)
    entries = [_entry(guard, entry) for guard in (cpu, own)]
    symbols = [symbol_at(address) for address in entries]
    if functions[0] != "type" or not all(_MANGLED in symbol for symbol in symbols):
        # They may be hidden in a build whose symbols were stripped; an entry that nobody can name is left alone.
        raise RuntimeError(f"the guard's entry {entry} is not {_FUNCTION} by its symbols, but {' and '.join(symbols)}")
    size = _BEFORE + len(functions) + _DESTRUCTORS
    before = pointer.value or 0
    table = (ctypes.c_void_p * size).from_buffer_copy(ctypes.string_at(before - _BEFORE * _WORD, size * _WORD))
    table[_BEFORE + entry] = entries[0]
    _tables.append(table)
    changes.on_undo(lambda: setattr(pointer, "value", before))
    pointer.value = ctypes.addressof(table) + _BEFORE * _WORD


def _entry(guard: int, entry: int) -> int:
    table = ctypes.c_void_p.from_address(guard).value or 0
    return ctypes.c_void_p.from_address(table + entry * _WORD).value or 0


def _device_type(name: str) -> int:
    return int(getattr(torch._C._autograd.DeviceType, name))
