"""Finds the symbol of a shared library to which a machine address belongs."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

# Offsets in the headers of a 64-bit ELF file, and the type of the table with all its symbols.
_SECTIONS = struct.Struct("<40xQ10xHH")  # where they are, the size of one, how many
_SECTION = struct.Struct("<4xI16xQQI12xQ")  # type, offset, size, linked section, size of an entry
_SYMBOL = struct.Struct("<I4xQQ")  # where its name is, address, size
_SYMTAB = 2


class _Found(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def symbol_at(address: int) -> str:
    """The symbol that begins at an address, mangled; "" if it is not known.

    The dynamic linker knows what a library exports, the library's file what it does not, unless it was stripped.
    """
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Found))
    found = _Found()
    if not address or not dladdr(address, ctypes.byref(found)):
        return ""
    if found.name and found.address == address:
        return bytes(found.name).decode()
    return symbol_in_file(Path(bytes(found.file).decode()), address - (found.base or 0))


def symbol_in_file(library: Path, offset: int) -> str:
    """The symbol at an offset from a library's base, from the file's own table; "" where it has none."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:6] != b"\x7fELF\x02\x01":
            return ""
        begin, size, count = _SECTIONS.unpack_from(content)
        sections = [_SECTION.unpack_from(content, begin + k * size) for k in range(count)]
        for kind, table, nbytes, linked, entry in sections:
            if kind != _SYMTAB:
                continue
            wanted = struct.pack("<Q", offset)
            place = content.find(wanted, table, table + nbytes)
            while place >= 0:
                row = place - 8
                if not (row - table) % entry:
                    name = sections[linked][1] + _SYMBOL.unpack_from(content, row)[0]
                    return content[name : content.find(b"\0", name)].decode()
                place = content.find(wanted, place + 1, table + nbytes)
    return ""
