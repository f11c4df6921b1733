"""Assertions on tensor values, which hold as stated checks of a program."""

from __future__ import annotations

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.registry import Check, lower


@lower("_assert_async", "_assert_async.msg")
def assert_async(
    x: Array, message: str = "Expected Tensor with single nonzero value, but got zero", *, check: Check
) -> None:
    """`torch._assert_async`: a tensor of one element must not be zero."""
    check(hlo.reshape(x.ne(0), ()), message, RuntimeError)
