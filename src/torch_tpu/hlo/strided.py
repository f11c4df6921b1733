"""Strided views of a value: (sizes, strides, offset) as slices, reshapes, transposes and broadcasts, and back.

A *base* is an Array whose elements lie densely in a storage, in some order of its dimensions. A *view* of that storage
is read by a chain of steps and written by undoing the chain: each step can say what its operand becomes when its
result is replaced.

Reading walks the view's dimensions from the largest stride to the smallest. At each level the storage is a row; a
dimension of n entries with stride s takes n sub-rows of it, either along a dimension the base already has, or after
reshaping the row to [rows, s]. Views whose dimensions don't nest this way (overlapping windows) become a gather.

Where a slice starts is a dynamic argument: `view_steps` returns the starts beside the steps, so that `x[i]` with
another i is the same program with another argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from torch_tpu import delayed
from torch_tpu.hlo import types

if TYPE_CHECKING:
    from torch_tpu.hlo import array as hlo
    from torch_tpu.hlo import structured
    from torch_tpu.hlo.array import Array

    Starts = Sequence[Array | int]
else:
    hlo = delayed.module("torch_tpu.hlo.array", globals(), "hlo")
    structured = delayed.module("torch_tpu.hlo.structured", globals(), "structured")

# What becomes of an element that several elements of a view show: they are equal; the last one counts; the last one
# that was changed counts; all changes are added up.
Shared = Literal["same", "last", "last changed", "sum"]


class SharedElements(NotImplementedError):
    """A write through a view in which two elements share a memory location: what stays depends on their order."""

    def __init__(self) -> None:
        super().__init__(
            "elements of a tensor that it writes share memory, so that the result depends on the order in which the "
            "CPU writes them; clone() the tensor before"
        )


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(sizes[d + 1], 1)
    return tuple(strides)


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory without gaps or overlap, in any order of the dimensions."""
    if 0 in sizes:
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, sizes, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def shares_elements(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a view may lie at the same place: surely not where its dimensions nest."""
    if 0 in sizes:
        return False
    reach = 0
    for stride, size in sorted((st, sz) for st, sz in zip(strides, sizes, strict=True) if sz != 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def storage_elements(sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> int:
    """The smallest number of elements a storage needs to hold this view."""
    if 0 in sizes:
        return 0
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@dataclass(frozen=True)
class Transpose:
    permutation: tuple[int, ...]

    def read(self, x: Array, starts: Starts) -> Array:
        return hlo.transpose(x, self.permutation)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        return hlo.transpose(new, sorted(range(len(self.permutation)), key=self.permutation.__getitem__))


@dataclass(frozen=True)
class Reshape:
    shape: tuple[int, ...]

    def read(self, x: Array, starts: Starts) -> Array:
        return hlo.reshape(x, self.shape)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        return hlo.reshape(new, x.shape)


@dataclass(frozen=True)
class PadEnd:
    """Padding of the last dimension, so that it can be cut into equal rows."""

    amount: int

    def read(self, x: Array, starts: Starts) -> Array:
        return hlo.pad(x, 0, [0] * x.ndim, [0] * (x.ndim - 1) + [self.amount])

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        return hlo.slice_(new, [0] * x.ndim, x.shape)


@dataclass(frozen=True)
class Slice:
    """`sizes` elements `strides` apart in each dimension; `moving` dimensions take their start from `starts`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    moving: tuple[int, ...]
    first: int  # where this step's entries begin in the starts of all steps

    def _block(self) -> list[int]:
        return [(size - 1) * stride + 1 for size, stride in zip(self.sizes, self.strides, strict=True)]

    def _begin(self, x: Array, starts: Starts) -> list[Array] | list[int]:
        begin: list[Array | int] = [0] * x.ndim
        for i, d in enumerate(self.moving):
            begin[d] = starts[self.first + i]
        if all(isinstance(b, int) for b in begin):
            return begin  # type: ignore[return-value]
        return [b if isinstance(b, hlo.Array) else hlo.constant(b, torch.int32) for b in begin]

    def read(self, x: Array, starts: Starts) -> Array:
        begin, block = self._begin(x, starts), self._block()
        if all(isinstance(b, int) for b in begin):
            return hlo.slice_(x, begin, [b + n for b, n in zip(begin, block, strict=True)], self.strides)  # type: ignore[arg-type, operator]
        return hlo.slice_(hlo.dynamic_slice(x, begin, block), [0] * x.ndim, block, self.strides)  # type: ignore[arg-type]

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        begin, block = self._begin(x, starts), self._block()
        if list(x.shape) == block and tuple(new.shape) == x.shape:
            return new
        if all(isinstance(b, int) for b in begin):
            begin = [hlo.constant(b, torch.int32) for b in begin]  # type: ignore[arg-type]
        if any(stride > 1 for stride in self.strides):
            gaps = [stride - 1 for stride in self.strides]
            none = [0] * x.ndim
            here = hlo.pad(hlo.constant(True, torch.bool, new.shape), False, none, none, gaps)
            spread = hlo.pad(new, 0, none, none, gaps)
            new = hlo.select(here, spread, hlo.dynamic_slice(x, begin, block))  # type: ignore[arg-type]
        return hlo.dynamic_update_slice(x, new, begin)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Broadcast:
    shape: tuple[int, ...]
    dimensions: tuple[int, ...]

    def read(self, x: Array, starts: Starts) -> Array:
        return hlo.broadcast_in_dim(x, self.shape, self.dimensions)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        raise SharedElements

    def write_shared(self, x: Array, new: Array, starts: Starts, how: Shared) -> Array:
        """What `x` becomes where several elements of `new` go to one of its own."""
        if how == "same":
            return hlo.reshape(hlo.slice_(new, [0] * new.ndim, self._once(x)), x.shape)
        shared = [d for d in range(new.ndim) if d not in self.dimensions]
        old = self.read(x, starts)
        if how == "sum":
            return x + structured.reduce_sum(new - old, shared)
        last = structured.reduce_max(_written_places(new, old, how), shared)
        return hlo.select(last < 0, x, _elements(new, last))

    def _once(self, x: Array) -> list[int]:
        sizes = [1] * len(self.shape)
        for d, size in zip(self.dimensions, x.shape, strict=True):
            sizes[d] = size
        return sizes


@dataclass(frozen=True)
class Empty:
    """A view without elements; it may lie anywhere. None stands for the base's dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def read(self, x: Array, starts: Starts) -> Array:
        return hlo.zeros(self.shape, self.dtype or x.dtype)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        return x


@dataclass(frozen=True)
class Windows:
    """Elements at start + Σ index·stride of a flat row, for views whose dimensions don't nest."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def _positions(self, starts: Starts) -> Array:
        start = starts[self.first]
        index = start if isinstance(start, hlo.Array) else hlo.constant(start, torch.int32)
        index = hlo.broadcast_to(index, self.sizes)
        for d, stride in enumerate(self.strides):
            index = index + hlo.iota(self.sizes, d) * stride
        return hlo.reshape(index, (-1, 1))

    def read(self, x: Array, starts: Starts) -> Array:
        taken = structured.gather(
            x, self._positions(starts), offset_dims=[], collapsed_slice_dims=[0], start_index_map=[0], slice_sizes=[1]
        )
        return hlo.reshape(taken, self.sizes)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        if shares_elements(self.sizes, self.strides):
            raise SharedElements
        return self._scatter(x, new, starts, lambda old, update: update, unique=True)

    def write_shared(self, x: Array, new: Array, starts: Starts, how: Shared) -> Array:
        """What `x` becomes where several elements of `new` go to one of its own."""
        if how == "same":
            return self._scatter(x, new, starts, lambda old, update: update, unique=False)
        old = self.read(x, starts)
        if how == "sum":
            return self._scatter(x, new - old, starts, lambda a, b: a + b, unique=False)
        none = hlo.full(x.shape, -1, torch.int32)
        last = self._scatter(none, _written_places(new, old, how), starts, hlo.maximum, unique=False)
        return hlo.select(last < 0, x, _elements(new, last))

    def _scatter(
        self, x: Array, new: Array, starts: Starts, combine: Callable[[Array, Array], Array], *, unique: bool
    ) -> Array:
        return structured.scatter(
            [x],
            self._positions(starts),
            [hlo.reshape(new, (-1,))],
            combine,
            update_window_dims=[],
            inserted_window_dims=[0],
            scatter_dims_to_operand_dims=[0],
            unique_indices=unique,
        )[0]


@dataclass(frozen=True)
class Retype:
    """The bytes of a flat base read as another dtype."""

    source: torch.dtype
    target: torch.dtype

    def read(self, x: Array, starts: Starts) -> Array:
        return _retype(x, self.target)

    def write(self, x: Array, new: Array, starts: Starts) -> Array:
        return _retype(new, self.source)


def _retype(x: Array, target: torch.dtype) -> Array:
    """A flat Array's bytes as `target`. StableHLO can't bitcast bool and complex, so these go by their parts."""
    if x.dtype is target:
        return x
    if x.dtype is torch.bool:
        return _retype(hlo.convert(x, torch.uint8), target)
    if target is torch.bool:
        return _retype(x, torch.uint8).ne(0)
    if x.dtype.is_complex:
        return _retype(hlo.reshape(hlo.stack([hlo.real(x), hlo.imag(x)], -1), (-1,)), target)
    if target.is_complex:
        parts = hlo.reshape(_retype(x, types.REAL_PART[target]), (-1, 2))
        return hlo.complex_(*(hlo.squeeze(hlo.slice_in_dim(parts, i, i + 1, dim=1), 1) for i in range(2)))
    if target.itemsize > x.dtype.itemsize:
        return hlo.bitcast(hlo.reshape(x, (-1, target.itemsize // x.dtype.itemsize)), target)
    return hlo.reshape(hlo.bitcast(x, target), (-1,))


def _written_places(new: Array, old: Array, how: Shared) -> Array:
    """The place of each element of `new`, in row-major order; -1 for those that are as in `old` and don't count."""
    places = hlo.reshape(hlo.iota((new.size,), 0, torch.int32), new.shape)
    return places if how == "last" else hlo.select(_differ(new, old), places, -1)


def _differ(a: Array, b: Array) -> Array:
    """Whether elements have other bits: a NaN is what it was, -0.0 is not 0.0."""
    if a.dtype.is_complex:
        return _differ(hlo.real(a), hlo.real(b)) | _differ(hlo.imag(a), hlo.imag(b))
    if a.dtype.is_floating_point:
        bits = _UNSIGNED[a.dtype.itemsize]
        a, b = hlo.bitcast(a, bits), hlo.bitcast(b, bits)
    return a.ne(b)


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _elements(x: Array, places: Array) -> Array:
    """The elements of `x` at places in row-major order; any element for -1."""
    taken = structured.gather(
        hlo.reshape(x, (-1,)),
        hlo.reshape(hlo.maximum(places, 0), (-1, 1)),
        offset_dims=[],
        collapsed_slice_dims=[0],
        start_index_map=[0],
        slice_sizes=[1],
    )
    return hlo.reshape(taken, places.shape)


Step = Transpose | Reshape | PadEnd | Slice | Broadcast | Empty | Windows | Retype


class _Plan:
    """Steps being collected; slices of neighbouring dimensions join, and reshapes in a row become one."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = list(shape)
        self.steps: list[Step] = []
        self.starts: list[int] = []
        self._slices: dict[int, tuple[int, int, int]] = {}

    def slice(self, d: int, start: int, size: int, stride: int = 1) -> None:
        if (start, size, stride) != (0, self.shape[d], 1):
            self._slices[d] = (start, size, stride)

    def flush(self) -> None:
        if not self._slices:
            return
        sizes, strides, moving, first = list(self.shape), [1] * len(self.shape), [], len(self.starts)
        for d, (start, size, stride) in sorted(self._slices.items()):
            sizes[d], strides[d] = size, stride
            if start:
                moving.append(d)
                self.starts.append(start)
        self._slices.clear()
        self.steps.append(Slice(tuple(sizes), tuple(strides), tuple(moving), first))
        self.shape = sizes

    def reshape(self, shape: Sequence[int]) -> None:
        self.flush()
        if list(shape) == self.shape:
            return
        if self.steps and isinstance(self.steps[-1], Reshape):
            self.steps.pop()
        self.steps.append(Reshape(tuple(shape)))
        self.shape = list(shape)

    def step(self, step: Step, shape: Sequence[int]) -> None:
        self.flush()
        self.steps.append(step)
        self.shape = list(shape)


def _take_level(plan: _Plan, done: int, size: int, stride: int, offset: int, inner: int) -> int:
    """Turns dimensions `done:` of the plan's array into [size, row…]; returns the offset left within a row.

    `inner` is how far the smaller dimensions of the view reach beyond an entry's first element.
    """
    row = plan.shape[done:]
    for split in range(len(row), 0, -1):
        trail = math.prod(row[split:])
        count = math.prod(row[:split])
        index, rest = divmod(offset, trail)
        step = stride // trail
        if stride % trail == 0 and rest + inner < trail and index + (size - 1) * step < count:
            if split > 1:
                plan.flush()
                plan.reshape([*plan.shape[:done], count, *row[split:]])
            plan.slice(done, index, size, step)
            return rest
    length = math.prod(row)
    plan.flush()
    plan.reshape([*plan.shape[:done], length])
    rest = offset % stride
    start = offset - rest if rest + inner < stride else offset
    rest = offset - start
    missing = stride - 1 - inner
    if start + size * stride > length:
        plan.step(PadEnd(missing), [*plan.shape[:done], length + missing])
    plan.slice(done, start, size * stride)
    plan.flush()
    plan.reshape([*plan.shape[:done], size, stride])
    return rest


@lru_cache(maxsize=4096)
def view_steps(
    base_sizes: tuple[int, ...],
    base_strides: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    base_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """How to read the view (sizes, strides, offset; in elements of `dtype`) from a dense base.

    Returns:
        The steps, and the starts that their moving dimensions take.

    Raises:
        RuntimeError: where the view reaches beyond the base, which a slice would not.
    """
    if sizes == base_sizes and strides == base_strides and offset == 0 and base_dtype is dtype:
        return (), ()
    result = _Plan(base_sizes)
    if 0 in sizes:
        return (Empty(sizes, dtype),), ()
    width, own_width = (1 if d is None else d.itemsize for d in (base_dtype, dtype))
    if storage_elements(sizes, strides, offset) * own_width > math.prod(base_sizes) * width:
        raise RuntimeError(
            f"setStorage: sizes {list(sizes)}, strides {list(strides)} and storage offset {offset} are out of bounds "
            f"for storage of {math.prod(base_sizes)} elements"
        )
    order = sorted(range(len(base_sizes)), key=lambda d: (-base_strides[d], base_sizes[d] == 1, d))
    if order != sorted(order):
        result.step(Transpose(tuple(order)), [base_sizes[d] for d in order])
    if base_dtype is not dtype:
        assert base_dtype is not None
        assert dtype is not None
        result.reshape([math.prod(base_sizes)])
        result.step(Retype(base_dtype, dtype), [math.prod(base_sizes) * base_dtype.itemsize // dtype.itemsize])
    else:
        result.reshape([size for size in result.shape if size != 1])

    kept = [d for d, size in enumerate(sizes) if size != 1 and strides[d] != 0]
    kept.sort(key=lambda d: -strides[d])
    reaches = [(sizes[d] - 1) * strides[d] for d in kept]
    nested = all(sum(reaches[i + 1 :]) < strides[d] for i, d in enumerate(kept))
    if nested:
        rest = offset
        for i, d in enumerate(kept):
            rest = _take_level(result, i, sizes[d], strides[d], rest, sum(reaches[i + 1 :]))
        for d in range(len(kept), len(result.shape)):
            index, rest = divmod(rest, math.prod(result.shape[d + 1 :]))
            result.slice(d, index, 1)
        result.reshape([sizes[d] for d in kept])
    else:
        result.reshape([math.prod(result.shape)])
        shape = tuple(sizes[d] for d in kept)
        result.step(Windows(shape, tuple(strides[d] for d in kept), len(result.starts)), shape)
        result.starts.append(offset)

    in_order = sorted(kept)
    if kept != in_order:
        result.step(Transpose(tuple(kept.index(d) for d in in_order)), [sizes[d] for d in in_order])
    if any(size != 1 and stride == 0 for size, stride in zip(sizes, strides, strict=True)):
        result.step(Broadcast(sizes, tuple(in_order)), sizes)
    else:
        result.reshape(sizes)
    return tuple(result.steps), tuple(result.starts)


def read(base: Array, steps: Sequence[Step], starts: Starts) -> Array:
    """The view's elements."""
    for step in steps:
        base = step.read(base, starts)
    return base


def write(base: Array, steps: Sequence[Step], starts: Starts, new: Array, shared: Shared | None = None) -> Array:
    """The base with the view's elements replaced by `new`.

    Args:
        shared: what becomes of an element of the base that several elements of the view show.

    Raises:
        SharedElements: where there are such and `shared` does not say.
    """
    operands = [base]
    for step in steps[:-1]:
        operands.append(step.read(operands[-1], starts))
    for step, operand in zip(reversed(steps), reversed(operands), strict=False):
        if shared is not None and isinstance(step, (Broadcast, Windows)):
            new = step.write_shared(operand, new, starts, shared)
        else:
            new = step.write(operand, new, starts)
    return new
