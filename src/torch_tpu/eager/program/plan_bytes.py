"""A plan as bytes that can't run code: a header in JSON, then the module's bytecode.

The header holds what the call that the plan is for doesn't say. Whatever is read is looked at: names come from fixed
tables, and places, sizes and strides have to fit the call. So bytes that are no plan of this call are refused, not
found out when the plan runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_tpu.eager.program.plan import Alias, Call, Fresh, Plan, data_dtype, new_target
from torch_tpu.hlo import strided, types
from torch_tpu.tensor.storage import Geometry, geometry

if TYPE_CHECKING:
    from torch_tpu.hlo import module

MAGIC = b"torch_tpu plan 1\n"
_LENGTH = 8
# Of every size, place and number; PyTorch's own are signed and of 64 bits.
_MOST = 2**63 - 1
# Bytes of a value: more than any memory.
_LARGEST = 2**46

_DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in types.NUMPY}
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RuntimeError, IndexError, ValueError, torch.linalg.LinAlgError)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ERROR_NAMES = {kind: name for name, kind in _ERRORS.items()}
# What a call may return beside tensors, as it is in JSON.
_PLAIN = (bool, int, str, type(None))


class Unstorable(Exception):
    """The plan holds what has no form as bytes."""


class Damaged(Exception):
    """The bytes are no plan of this call."""


# --- writing -----------------------------------------------------------------------------------------------------


def dump(plan: Plan) -> bytes:
    """The plan as bytes.

    Raises:
        Unstorable
    """
    code = plan.code()
    header = {
        "module": hashlib.sha256(code).hexdigest(),
        "digest": plan.digest,
        "results": [[list(shape), _dtype_name(dtype)] for shape, dtype in plan.results],
        "operations": [[name, list(shape), count] for (name, shape), count in plan.operations.items()],
        "custom_calls": sorted(plan.custom_calls),
        "reads_precision": plan.reads_precision,
        "ranks": list(plan.ranks),
        "bases": list(plan.bases),
        "starts": [i for i, _ in plan.starts],
        "data": [i for i, _ in plan.data],
        "hosts": [i for i, _ in plan.hosts],
        "for_offsets": plan.for_offsets,
        "uses_rng": plan.uses_rng,
        "draws": plan.draws,
        "writes": [[i, result, _geometry(g)] for i, result, g in plan.writes],
        "checks": [[slot, message, _error_name(kind), value] for slot, message, kind, value in plan.checks],
        "returned": _tree(plan.returned),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(_LENGTH, "little") + text + code


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise Unstorable(f"{dtype}")
    return _DTYPE_NAMES[dtype]


def _error_name(kind: type[Exception]) -> str:
    if kind not in _ERROR_NAMES:
        raise Unstorable(f"{kind}")
    return _ERROR_NAMES[kind]


def _geometry(g: Geometry) -> list[Any]:
    return [list(g.sizes), list(g.strides), _dtype_name(g.dtype)]


def _tree(value: Any) -> Any:
    if isinstance(value, Fresh):
        place = [list(value.sizes), list(value.strides), value.offset, _dtype_name(value.dtype)]
        return {"fresh": [value.result, _geometry(value.geometry), *place, value.contiguous]}
    if isinstance(value, Alias):
        if value.same:
            return {"same": value.input}
        place = [list(value.sizes), list(value.strides), value.offset, _dtype_name(value.dtype)]
        return {"alias": [value.input, *place]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_tree(item) for item in value]}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is torch.dtype:
        return {"dtype": _dtype_name(value)}
    if type(value) not in _PLAIN:
        raise Unstorable(f"{type(value).__name__} is returned")
    return value


# --- reading -----------------------------------------------------------------------------------------------------


def load(content: bytes, call: Call) -> Plan:
    """The plan of a call.

    Raises:
        Damaged: where the bytes are none.
    """
    _require(content.startswith(MAGIC), "it was written by another version of torch_tpu")
    begin = len(MAGIC) + _LENGTH
    end = begin + int.from_bytes(content[len(MAGIC) : begin], "little")
    _require(end <= len(content), "the file is cut off")
    try:
        header = json.loads(content[begin:end], parse_float=_no_number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header can't be read ({error})") from None
    return _Reader(header, content[end:], call).plan()


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not an integer")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Damaged(what)


class _Reader:
    """Makes a plan of a header; what it says of places is looked at beside the call."""

    def __init__(self, header: Any, code: bytes, call: Call) -> None:
        _require(isinstance(header, dict) and header.keys() == _READ_BY.keys(), "its header has unexpected fields")
        self.header: dict[str, Any] = header
        self.code = code
        self.call = call
        self.results: list[module.Spec] = [self._spec(item) for item in self._list(header["results"])]

    def plan(self) -> Plan:
        header, call = self.header, self.call
        _require(header["module"] == hashlib.sha256(self.code).hexdigest(), "its program does not match its checksum")
        bases = self._places("bases", len(call.inputs))
        starts = self._places("starts", len(call.inputs))
        data, hosts = self._places("data", len(call.data)), self._places("hosts", len(call.hosts))
        _require(all(call.inputs[i].storage == i for i in bases), "it lists a storage as an input twice")
        _require(all(call.inputs[i].starts for i in starts), "an input that it slices is not a slice in this call")
        uses_rng = self._bool(header["uses_rng"])
        numbers: list[module.Spec] = [((call.inputs[i].starts,), torch.int32) for i in starts]
        numbers += [((), data_dtype(call.data[i], call.wide)) for i in data]
        numbers += [((), call.hosts[i]) for i in hosts]
        target = new_target()
        target.custom_calls = set(map(self._text, self._list(header["custom_calls"])))
        target.reads_precision = self._bool(header["reads_precision"])
        target.ranks = self._numbers(header["ranks"])
        writes = tuple(map(self._write, self._list(header["writes"])))
        self._nbytes = [spec.nbytes for spec in call.inputs]
        for i, _, g in writes:  # a storage may grow
            self._nbytes = [
                max(nbytes, g.nbytes) if spec.storage == i else nbytes
                for nbytes, spec in zip(self._nbytes, call.inputs, strict=True)
            ]
        return Plan(
            call.name,
            self.code,
            [
                *((tuple(call.inputs[i].geometry.sizes), call.inputs[i].geometry.dtype) for i in bases),
                *numbers,
                *([((2,), torch.uint64)] if uses_rng else []),
            ],
            self.results,
            Counter(dict(map(self._operation, self._list(header["operations"])))),
            target,
            bases=bases,
            starts=tuple((i, call.inputs[i].starts) for i in starts),
            data=tuple((i, data_dtype(call.data[i], call.wide)) for i in data),
            hosts=tuple((i, call.hosts[i]) for i in hosts),
            for_offsets=self._bool(header["for_offsets"]),
            uses_rng=uses_rng,
            draws=self._number(header["draws"]),
            writes=writes,
            checks=tuple(map(self._check, self._list(header["checks"]))),
            guarded=call.guarded,
            returned=self._returned(header["returned"]),
            digest=self._number(header["digest"]),
        )

    # --- fields --------------------------------------------------------------------------------------------------

    def _spec(self, item: Any) -> module.Spec:
        shape, dtype = self._items(item, 2)
        sizes, of = self._numbers(shape), self._dtype(dtype)
        self._size(sizes, of)
        return sizes, of

    def _operation(self, item: Any) -> tuple[tuple[str, tuple[int, ...]], int]:
        name, shape, count = self._items(item, 3)
        return (self._text(name), self._numbers(shape)), self._number(count)

    def _write(self, item: Any) -> tuple[int, int, Geometry]:
        i, result, g = self._items(item, 3)
        place = self._number(i, len(self.call.inputs) - 1)
        _require(self.call.inputs[place].storage == place, "it lists a storage as an output twice")
        return place, *self._result(result, g)

    def _check(self, item: Any) -> tuple[int, str, type[Exception], int | None]:
        slot, message, kind, value = self._items(item, 4)
        slot, message = self._number(slot, len(self.results) - 1), self._text(message)
        _require(self.results[slot] == ((), torch.bool), "a run-time check is not a bool")
        _require(isinstance(kind, str) and kind in _ERRORS, f"{kind!r} is not an error type")
        if value is not None:
            value = self._number(value, len(self.results) - 1)
            _require(self.results[value][0] == (), "the value in a message is not a single number")
            _require(_is_filled_by_one(message), "a message has placeholders for more than one value")
        return slot, message, _ERRORS[kind], value

    def _returned(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        _require(isinstance(value, dict) and len(value) == 1, "the description of a returned value is malformed")
        ((form, content),) = value.items()
        if form == "list":
            return [self._returned(item) for item in self._list(content)]
        if form == "tuple":
            return tuple(self._returned(item) for item in self._list(content))
        if form == "same":
            return Alias(self._number(content, len(self.call.inputs) - 1), True)
        if form == "alias":
            i, *extent, offset, dtype = self._items(content, 5)
            i, of = self._number(i, len(self.call.inputs) - 1), self._dtype(dtype)
            source = self.call.inputs[i]
            # In bytes, from where the input begins.
            _require(type(offset) is int and abs(offset) <= _MOST, "the offset of a view is not valid")
            begin, odd = divmod(source.offset * source.dtype.itemsize + offset, of.itemsize)
            _require(not odd, "the offset of a view lies inside an element")
            view = self._place([*extent, begin, dtype], self._nbytes[i])
            return Alias(i, False, *view[:2], offset, of)
        if form == "fresh":
            result, g, *place, contiguous = self._items(content, 7)
            result, shape = self._result(result, g)
            sizes, strides, offset, dtype = self._place(place, shape.nbytes)
            if self._bool(contiguous):
                whole = not offset and math.prod(sizes) * dtype.itemsize == shape.nbytes
                _require(whole and strides == strided.contiguous_strides(sizes), "a contiguous result is not")
            return Fresh(result, shape, sizes, strides, offset, dtype, contiguous)
        if form == "float":
            try:
                return float.fromhex(self._text(content))
            except (ValueError, OverflowError) as error:
                raise Damaged(str(error)) from None
        _require(form == "dtype", f"{form!r} is not a kind of returned value")
        return self._dtype(content)

    def _result(self, result: Any, g: Any) -> tuple[int, Geometry]:
        """A result and how it lies in its storage."""
        result = self._number(result, len(self.results) - 1)
        sizes, strides, dtype = self._items(g, 3)
        shape, own, of = self._numbers(sizes), self._numbers(strides), self._dtype(dtype)
        _require((shape, of) == self.results[result], "a result does not have the shape or dtype of its storage")
        _require(len(shape) == len(own) and strided.is_dense(shape, own), "the strides of a result leave gaps")
        return result, geometry(shape, own, of)

    def _place(self, place: Sequence[Any], nbytes: int) -> tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]:
        """A view of a storage of so many bytes."""
        sizes, strides, offset, dtype = place
        sizes, strides, offset, of = *map(self._numbers, (sizes, strides)), self._number(offset), self._dtype(dtype)
        _require(len(sizes) == len(strides), "a view has a different number of sizes and strides")
        _require(strided.storage_elements(sizes, strides, offset) * of.itemsize <= nbytes, "a view exceeds its storage")
        return sizes, strides, offset, of

    # --- parts ---------------------------------------------------------------------------------------------------

    def _places(self, field: str, count: int) -> tuple[int, ...]:
        found = tuple(self._number(i, count - 1) for i in self._list(self.header[field]))
        _require(len(set(found)) == len(found), "an argument is listed twice")
        return found

    def _size(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        _require(math.prod(sizes) * dtype.itemsize <= _LARGEST, "a result is too large")

    def _list(self, value: Any) -> list[Any]:
        _require(isinstance(value, list), "a list is expected")
        found: list[Any] = value
        return found

    def _items(self, value: Any, count: int) -> list[Any]:
        _require(len(self._list(value)) == count, "a list has an unexpected length")
        found: list[Any] = value
        return found

    def _numbers(self, value: Any) -> tuple[int, ...]:
        return tuple(map(self._number, self._list(value)))

    def _number(self, value: Any, most: int = _MOST) -> int:
        _require(type(value) is int and 0 <= value <= most, "a number is missing or out of range")
        found: int = value
        return found

    def _bool(self, value: Any) -> bool:
        _require(isinstance(value, bool), "true or false is expected")
        found: bool = value
        return found

    def _text(self, value: Any) -> str:
        _require(isinstance(value, str), "a string is expected")
        found: str = value
        return found

    def _dtype(self, value: Any) -> torch.dtype:
        _require(isinstance(value, str) and value in _DTYPES, f"{value!r} is not a dtype")
        return _DTYPES[value]


# The fields of a header.
_READ_BY = dict.fromkeys(
    (
        *(
            "module",
            "digest",
            "results",
            "operations",
            "custom_calls",
            "reads_precision",
            "ranks",
            "bases",
            "starts",
            "data",
        ),
        *("hosts", "for_offsets", "uses_rng", "draws", "writes", "checks", "returned"),
    )
)


def _is_filled_by_one(message: str) -> bool:
    """Whether `message.format(value)` does nothing but put the value in."""
    try:
        fields = [part[1:] for part in string.Formatter().parse(message) if part[1] is not None]
    except ValueError:
        return False
    return len(fields) <= 1 and all(field == ("", "", None) for field in fields)
