"""Which kernel every overload gets and what its calls take, found once and kept on disk.

To find it needs the schema of every overload and all lowerings: half a second. With the table, an operator is looked
at when it is first called, and its lowering is loaded when it is first traced.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

import torch_tpu.ops.convolution_shapes
import torch_tpu.ops.private_operators  # noqa: F401  (defines those of the device)
from torch_tpu.ops.core import derived, families, registry, schema
from torch_tpu.ops.core.schema import signature
from torch_tpu.runtime import disk_cache, fingerprint

# What an overload's kernel is: a program of its own, that of its functional twin, PyTorch's that only describes memory,
# or none (PyTorch's composite kernel).
PROGRAM, OUT, VIEW, NONE = "program", "out", "view", ""
_KINDS = frozenset({PROGRAM, OUT, VIEW, NONE})
_NAMESPACES = ("aten::", "tpu::", "prims::")

# Composite kernels that are right for PyTorch's own devices only: they refuse others, write to their memory, or take an
# `out=` that these refuse.
_NAMES_ITS_DEVICES = frozenset(
    {
        "aten::_stack.out",
        "aten::addr.out",
        "aten::all.dims_out",
        "aten::any.dims_out",
        "aten::mode.values",
        "aten::range.out_",
    }
)
# `out=` forms of composite operators that call it in turn.
_CALLED_BY_ITS_TWIN = frozenset({"aten::sspaddmm.out"})

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


class Row(NamedTuple):
    """What is known of an overload.

    Attributes:
        kind: of its kernel.
        twin: for `out=`, the name of the functional overload.
        is_list: it does the same to each entry of its lists.
        data: for each argument whether it is an input of the program; None where that depends on its value.
        wide: numbers arrive as float64.
        writes: it changes arguments.
    """

    kind: str
    twin: str
    is_list: bool
    data: tuple[bool, ...] | None
    wide: bool
    writes: bool


def overload(name: str) -> Any:
    """The overload of a name such as "aten::add.Tensor"; None where PyTorch shows it to C++ alone."""
    namespace, _, rest = name.partition("::")
    packet, _, overload_name = rest.partition(".")
    return schema.overload(packet, overload_name, namespace)


def row_of(name: str, func: OpOverload) -> Row:
    """What the schema, the dispatcher and the lowerings say of an overload."""
    kind, twin = _kernel(name, func)
    sig = signature(func)
    data = [derived.is_data(func, a) for a in sig.arguments]
    rule = derived.lowering(func)
    return Row(
        kind,
        twin,
        derived.is_entrywise(func) or derived.writes_lists(func),
        None if any(callable(d) for d in data) else tuple(map(bool, data)),
        rule is not None and rule.wide,
        any(a.is_written for a in sig.arguments) or (rule is not None and bool(rule.mutates)),
    )


def _kernel(name: str, func: OpOverload) -> tuple[str, str]:
    """The kind of an overload's kernel, and for `out=` the name of the functional overload."""
    if _has_kernel(name, "CompositeImplicitAutograd") and not (
        _has_kernel(name, "Autograd") and derived.lowering(func)
    ):
        # Taking over a composite operator takes its derivative away, unless it has a formula besides.
        return NONE, ""
    sig = signature(func)
    own = derived.lowering(func) or derived.foreach_element(func) or registry.decomposes_here(func)
    if own and not sig.is_out:
        return PROGRAM, ""
    if _has_kernel(name, "CompositeExplicitAutograd") and name not in _NAMES_ITS_DEVICES:
        return NONE, ""
    if sig.is_out:
        twin = derived.functional(func)
        return (PROGRAM, "") if twin is None or name in _CALLED_BY_ITS_TWIN else (OUT, twin.name())
    if not _has_kernel(name, "CPU") and not _has_kernel(name, "CompositeExplicitAutogradNonFunctional"):
        return NONE, ""
    return (VIEW if sig.is_view else PROGRAM), ""


# --- on disk -----------------------------------------------------------------------------------------------------


def _names() -> list[str]:
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(_NAMESPACES))


def _key(names: list[str]) -> str:
    """The name of the table of this PyTorch, with these operators, and of this package."""
    described = "\n".join(["kernel table", torch.__version__, fingerprint.own_sources(), *names])
    return hashlib.sha256(described.encode()).hexdigest()


def _dump(rows: Mapping[str, Row], index: Mapping[str, str]) -> bytes:
    written = {
        name: [*row[:3], None if row.data is None else "".join("01"[d] for d in row.data), *row[4:]]
        for name, row in rows.items()
    }
    return json.dumps({"rows": written, "families": index}, separators=(",", ":")).encode()


def _parse(content: bytes) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows, and the family of each operator with a lowering.

    Raises:
        ValueError: where the bytes are no table.
    """
    try:
        table = json.loads(content)
        rows = {
            name: Row(kind, twin, is_list, None if data is None else tuple(d == "1" for d in data), wide, writes)
            for name, (kind, twin, is_list, data, wide, writes) in table["rows"].items()
        }
        index: dict[str, str] = table["families"]
        if {row.kind for row in rows.values()} <= _KINDS and set(index.values()) <= {*families.FAMILIES, ""}:
            return rows, index
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    raise ValueError("a kernel or family has another name")


_lock = threading.Lock()
_rows: dict[str, Row] = {}


def rows() -> Mapping[str, Row]:
    """What is known of each overload of these namespaces, by its name."""
    with _lock:
        if not _rows:
            names = _names()
            cache, key = disk_cache.from_environment(), _key(names)
            content = None if cache is None else cache.read(key)
            if cache is not None and content is not None:
                try:
                    found, index = _parse(content)
                except ValueError as error:
                    cache.reject(key, f"is no table of kernels ({error})")
                else:
                    families.use_index(index)
                    _rows.update(found)
                    return _rows
            known = ((name, overload(name)) for name in names)
            _rows.update({name: row_of(name, func) for name, func in known if func is not None})
            if cache is not None:
                cache.write(key, _dump(_rows, registry.index()))
    return _rows
