"""What there is to check: every (operator, dtype) pair of PyTorch's test database that the CPU answers for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.testing._internal import common_methods_invocations as invocations

from tests.conformance import tolerances

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


class Entry(NamedTuple):
    """One line of the results: an operator of the database in one dtype."""

    op: str
    variant: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op}{'.' + self.variant if self.variant else ''} {self.dtype}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _infos() -> dict[tuple[str, str], Any]:
    foreach = [
        info
        for kind in ("unary", "binary", "pointwise", "reduce", "other")
        for info in getattr(invocations, f"foreach_{kind}_op_db")
    ]
    return {(info.name, info.variant_test_name): info for info in [*invocations.op_db, *foreach]}


def info_of(entry: Entry) -> Any:
    """The database's OpInfo of an entry."""
    return _infos()[entry.op, entry.variant]


def entries(pattern: str = "", dtypes: Sequence[torch.dtype] = DTYPES) -> list[Entry]:
    """Every pair, or those whose operator matches a regular expression; one dtype after the other."""
    wanted = re.compile(pattern)
    return [
        Entry(op, variant, dtype_name(dtype))
        for dtype in dtypes
        for (op, variant), info in _infos().items()
        if dtype in info.supported_dtypes("cpu")
        and op not in tolerances.NOT_POSSIBLE
        and wanted.search(f"{op}.{variant}" if variant else op)
    ]
