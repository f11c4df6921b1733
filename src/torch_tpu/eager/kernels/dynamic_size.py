"""Kernels of operators whose result size depends on data.

Each runs one program that computes a padded result and its true size, reads the size on the host (the only wait), and
returns a tensor over the front of the padded memory. On a topology, where there is no size to read, it is the largest
it can be; `repeat_interleave` then repeats each element once, and `bincount` finds zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel
from torch_tpu.hlo.strided import contiguous_strides
from torch_tpu.hlo.types import type_name
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import view
from torch_tpu.tensor.transfer import host_view

tpu = torch.ops.tpu
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _front(padded: torch.Tensor, sizes: Sequence[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """The first elements of a padded result."""
    strides = contiguous_strides(sizes) if strides is None else strides
    return view(padded.untyped_storage(), padded.dtype, 0, sizes, strides)


def _padded_size(size: int) -> int:
    """A power of two, so that nearby sizes share a program."""
    return 1 << (size - 1).bit_length() if size else 0


def _read(numbers: torch.Tensor) -> list[int]:
    values: list[int] = host_view(numbers, "size that depends on data").reshape(-1).tolist()
    return values


def _size(number: torch.Tensor, most: int) -> int:
    """The size in `number`; on a topology the most it can be."""
    (size,) = _read(number)
    return size if client().runs else most


def _indices(t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.int64, device=t.device)


# --- where a tensor is true --------------------------------------------------------------------------------------


@kernel("nonzero")
def nonzero(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return torch.empty_strided((0, x.dim()), (1, 0), dtype=torch.int64, device=x.device)
    positions, count = as_program(tpu.nonzero_padded.default)(x)
    size = _size(count, x.numel())
    return _front(positions, (size, x.dim()), (1, size))


@kernel("masked_select")
def masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    if not math.prod(torch.broadcast_shapes(x.shape, mask.shape)):
        return torch.empty(0, dtype=x.dtype, device=x.device)
    values, count = as_program(tpu.masked_select_padded.default)(x, mask)
    return _front(values, (_size(count, values.numel()),))


# --- unique ------------------------------------------------------------------------------------------------------

_Unique = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _unique_elements(x: torch.Tensor, sort: bool, inverse: bool, counts: bool) -> _Unique:
    if not x.numel():
        nothing = torch.empty(0, dtype=x.dtype, device=x.device)
        return nothing, _indices(x, x.shape if inverse else (0,)), _indices(x, (0,))
    values, run, length, number = as_program(tpu.unique_padded.default)(x, sort, inverse, counts)
    size = (_size(number, x.numel()),)
    return _front(values, size), run, _front(length, size) if counts else length


def _unique_slices(x: torch.Tensor, dim: int, sort: bool) -> _Unique:
    if not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(x.dim(), 1)}, {max(x.dim(), 1) - 1}], "
            f"but got {dim})"
        )
    if not x.dim():
        raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
    dim %= x.dim()
    if not x.numel():
        if x.shape[dim] or x.shape.count(0) > 1:
            raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), _indices(x, (0,)), _indices(x, (0,))
    values, run, length, number = as_program(tpu.unique_slices_padded.default)(x, dim, sort)
    size = _size(number, x.shape[dim])
    return _front(values, (size, *values.shape[1:])).movedim(0, dim), run, _front(length, (size,))


@kernel("_unique")
def unique(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _unique_elements(x, True, return_inverse, False)[:2]


@kernel("_unique2")
def unique2(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> _Unique:
    return _unique_elements(x, True, return_inverse, return_counts)


@kernel("unique_consecutive")
def unique_consecutive(
    x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> _Unique:
    if dim is None or (x.dim() == 1 and dim in (0, -1)):
        return _unique_elements(x, False, return_inverse, return_counts)
    return _unique_slices(x, dim, False)


@kernel("unique_dim")
def unique_dim(
    x: torch.Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> _Unique:
    return _unique_slices(x, dim, True)


@kernel("unique_dim_consecutive")
def unique_dim_consecutive(
    x: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> _Unique:
    return _unique_slices(x, dim, False)


# --- sizes that are values ---------------------------------------------------------------------------------------


def _not_implemented(kernel_name: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel_name}\" not implemented for '{type_name(dtype)}'")


@kernel("bincount")
def bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if x.dim() == 1 and not x.numel():
        return torch.zeros(minlength, dtype=torch.int64, device=x.device)
    if x.dtype not in _INTEGERS:
        raise _not_implemented("bincount_cpu", x.dtype)
    least, greatest = _read(as_program(tpu.least_and_greatest.default)(x)) if x.dim() == 1 else (-1, 0)
    if least < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    size = max(greatest + 1, minlength)
    return _front(as_program(tpu.bincount_sized.default)(x, weights, _padded_size(size)), (size,))


@kernel("repeat_interleave.Tensor")
def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if not repeats.numel():
        return torch.empty_like(repeats)
    if repeats.dtype not in (torch.int32, torch.int64):
        raise _not_implemented("repeat_interleave_cpu", repeats.dtype)
    run = as_program(tpu.repeat_interleave_sized.default)
    if output_size is not None:
        return run(repeats, output_size, True)
    least, total = _read(as_program(tpu.least_and_sum.default)(repeats))
    if not client().runs:
        total = repeats.numel()
    if least < 0:
        raise RuntimeError("repeats can not be negative")
    return _front(run(repeats, _padded_size(total), False), (total,))


@kernel("_padded_dense_to_jagged_forward")
def padded_to_jagged(dense: torch.Tensor, offsets: Sequence[torch.Tensor], total_L: int | None = None) -> torch.Tensor:
    if total_L is None:
        total_L = _size(offsets[0][-1:].clone(), dense.shape[0] * dense.shape[1])
    packed: torch.Tensor = as_program(torch.ops.aten._padded_dense_to_jagged_forward.default)(dense, offsets, total_L)
    return packed
