"""The optimised HLO of a compiled program as text, also where libtpu writes what this jaxlib does not read.

libtpu 0.0.52 gives an `async-update` all operands of its operation; XLA in jaxlib 0.10.2 wants one and refuses the
module. The module also lies in the serialised executable, as a protocol buffer: taken from there, with the further
operands left out, it can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_tpu.runtime import compat

# Field numbers of xla/service/hlo.proto.
_COMPUTATIONS = 3  # of HloModuleProto
_INSTRUCTIONS = 2  # of HloComputationProto
_OPCODE, _OPERANDS = 2, 36  # of HloInstructionProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def text(compiled: Any, name: str) -> str:
    """The optimised HLO of jaxlib's compiled program of a module of this name; empty where it can't be read."""
    try:
        modules = compiled.hlo_modules()
    except compat.xla.JaxRuntimeError:
        modules = [_from_executable(compiled.serialize(), name.encode())]
    return "\n\n".join(module.to_string() for module in modules if module is not None)


def _from_executable(executable: bytes, name: bytes) -> Any:
    # A HloModuleProto begins with its name and goes on with that of its entry computation.
    head = b"\n" + _encoded(len(name)) + name + b"\x12"
    begin = executable.find(head)
    while begin >= 0:
        for size in _sizes_before(executable, begin):
            try:
                return compat.hlo_module(_readable(executable[begin : begin + size]))
            except (IndexError, ValueError, compat.xla.JaxRuntimeError):
                continue
        begin = executable.find(head, begin + 1)
    return None


def _sizes_before(data: bytes, begin: int) -> Iterator[int]:
    """What may be the length of a message at `begin`: it stands before it, behind its tag. Longer ones first."""
    for width in range(5, 0, -1):
        if begin > width and data[begin - width - 1] & 7 == _BYTES:
            size, end = _varint(data, begin - width)
            if end == begin and size <= len(data) - begin:
                yield size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Number, begin, begin of the contents and end of each field."""
    at = 0
    while at < len(message):
        begin = at
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        contents = at
        if kind == _VARINT:
            at = _varint(message, at)[1]
        elif kind == _BYTES:
            size, contents = _varint(message, at)
            at = contents + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError("no protocol buffer")
        if at > len(message):
            raise ValueError("no protocol buffer")
        yield number, begin, contents, at


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _rewritten(message: bytes, number: int, change: Any) -> bytes:
    """The message with each of its fields of this number changed."""
    parts = []
    for field, begin, contents, end in _fields(message):
        if field == number:
            changed = change(message[contents:end])
            parts.append(_encoded(number << 3 | _BYTES) + _encoded(len(changed)) + changed)
        else:
            parts.append(message[begin:end])
    return b"".join(parts)


def _readable(module: bytes) -> bytes:
    return _rewritten(module, _COMPUTATIONS, lambda c: _rewritten(c, _INSTRUCTIONS, _with_one_operand))


def _with_one_operand(instruction: bytes) -> bytes:
    """The instruction; an `async-update` with the first of its operands alone."""
    fields = list(_fields(instruction))
    if not any(n == _OPCODE and instruction[c:e] == b"async-update" for n, _, c, e in fields):
        return instruction
    parts = []
    for number, begin, contents, end in fields:
        if number == _OPERANDS:
            first = _encoded(_varint(instruction, contents)[0])
            parts.append(_encoded(_OPERANDS << 3 | _BYTES) + _encoded(len(first)) + first)
        else:
            parts.append(instruction[begin:end])
    return b"".join(parts)
