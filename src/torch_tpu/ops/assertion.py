"""Assertions on tensor values, which hold as stated checks of a program."""

from __future__ import annotations

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import Check, decompose, lower


@lower("_assert_async", "_assert_async.msg")
def assert_async(
    x: Array, message: str = "Expected Tensor with single nonzero value, but got zero", *, check: Check
) -> None:
    """`torch._assert_async`: a tensor of one element must not be zero."""
    check(hlo.reshape(x.ne(0), ()), message, RuntimeError)


# --- the functional form, which orders assertions by a token that each takes and returns --------------------------


@decompose("_make_dep_token")
def make_token(
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device=device)


@decompose("_functional_assert_async.msg")
def functional_assert_async(x: torch.Tensor, message: str, token: torch.Tensor) -> torch.Tensor:
    torch._assert_async(x, message)
    return token.clone()
