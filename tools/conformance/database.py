"""What there is to check: every (operator, dtype) pair of PyTorch's test database that the CPU answers for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.hop_db import hop_db

from tools.conformance import backward_calls, tolerances

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


KINDS = ("operator", "higher-order", "module", "optimizer", "compiled", "backward")
# In which of them an operator is compiled: the first that it supports.
COMPILED_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)


class Entry(NamedTuple):
    """One line of the results: an operator, a module or an optimizer of the database in one dtype,
    or a backward operator that takes a mask.

    Attributes:
        variant: of an operator, the database's; of a module, "train" or "eval" where they differ; of an optimizer, the
            implementation; of a backward operator, the overload.
    """

    op: str
    variant: str
    dtype: str
    kind: str = "operator"

    def __str__(self) -> str:
        return f"{self.op}{'.' + self.variant if self.variant else ''} {self.dtype}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _infos() -> dict[str, dict[tuple[str, str], Any]]:
    foreach = [
        info
        for kind in ("unary", "binary", "pointwise", "reduce", "other")
        for info in getattr(invocations, f"foreach_{kind}_op_db")
    ]
    modes = {False: ("",), True: ("train", "eval")}
    operators = {(i.name, i.variant_test_name): i for i in [*invocations.op_db, *foreach]}
    higher_order = {(i.name, i.variant_test_name): i for i in hop_db}
    return {
        "operator": operators,
        "higher-order": higher_order,
        "compiled": operators | higher_order,
        "module": {(i.name, mode): i for i in module_db for mode in modes[i.train_and_eval_differ]},
        "backward": dict(backward_calls.CALLS),
        "optimizer": {(i.name, form): i for i in optim_db for form in ("for-loop", *i.supported_impls)},
    }


def info_of(entry: Entry) -> Any:
    """The database's OpInfo, ModuleInfo or OptimizerInfo of an entry."""
    return _infos()[entry.kind][entry.op, entry.variant]


def entries(pattern: str = "", dtypes: Sequence[torch.dtype] = DTYPES, kinds: Sequence[str] = KINDS) -> list[Entry]:
    """Every pair, or those whose name matches a regular expression; one dtype after the other."""
    wanted = re.compile(pattern)
    return [
        Entry(op, variant, dtype_name(dtype), kind)
        for kind in kinds
        for dtype in dtypes
        for (op, variant), info in _infos()[kind].items()
        if dtype in _dtypes(kind, info)
        and op not in tolerances.NOT_POSSIBLE
        and (op, dtype_name(dtype)) not in tolerances.NOT_POSSIBLE_IN
        and wanted.search(f"{op}.{variant}" if variant else op)
    ]


def _dtypes(kind: str, info: Any) -> set[torch.dtype]:
    """What the CPU may support; the databases name few dtypes of modules and none of optimizers."""
    if kind == "module":
        return {*info.dtypes, *FLOATS}
    if kind == "optimizer":
        dtypes = {*FLOATS, torch.complex64} if info.supports_complex else set(FLOATS)
        return dtypes - set(tolerances.CHAOTIC.get(info.name, ((), ""))[0])
    if kind == "backward":
        return {torch.float32, torch.float64}
    supported = set(info.supported_dtypes("cpu"))
    if kind == "compiled":
        return set([d for d in COMPILED_DTYPES if d in supported][:1])
    return supported & set(FLOATS) if info.name in tolerances.FLOAT_SAMPLES else supported
