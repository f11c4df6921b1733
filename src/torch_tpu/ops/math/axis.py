"""Linear maps along one dimension whose tables are known when a program is built: shared by pooling and resizing.

A resize or an average over windows is, along each dimension, a banded matrix. It is applied as a sum of gathered taps
rather than a matrix product, so that infinities and NaN reach only the results whose window holds them, as on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array

Table = npt.NDArray[Any]
# Up to this many taps are added one by one; more are gathered together and reduced, so that programs stay small.
UNROLLED = 8


@dataclass(frozen=True)
class Band:
    """A matrix (results, size) given by rows: row o has the weights `weights[o]` at columns start[o], start[o] + 1, …

    Attributes:
        used: which of the entries exist; others contribute nothing even of an infinite element.
    """

    size: int
    start: Table
    weights: Table
    used: Table

    @classmethod
    def of_taps(cls, size: int, columns: Table, weights: Table) -> Band:
        """From per-row columns and their weights, both (results, taps); equal columns add up."""
        start = columns.min(axis=1)
        width = int((columns.max(axis=1) - start).max()) + 1 if len(columns) else 1
        shape = (len(columns), width)
        full, used = np.zeros(shape, weights.dtype), np.zeros(shape, bool)
        place = (np.arange(len(columns))[:, None], columns - start[:, None])
        np.add.at(full, place, weights)
        used[place] = True
        return cls(size, start, full, used)

    @classmethod
    def of_windows(cls, size: int, start: Table, end: Table) -> Band:
        """Sums of the elements start[o] ≤ i < end[o]; elements outside of [0, size) are zero."""
        width = max(int((end - start).max()), 1) if len(start) else 1
        columns = start[:, None] + np.arange(width)
        used = (columns < end[:, None]) & (columns >= 0) & (columns < size)
        return cls(size, start, used.astype(np.float64), used)

    def adjoint(self) -> Band:
        """The transposed matrix."""
        results = len(self.start)
        rows, taps = np.nonzero(self.used)
        columns = self.start[rows] + taps
        start = np.full(self.size, results)
        end = np.zeros(self.size, np.int64)
        np.minimum.at(start, columns, rows)
        np.maximum.at(end, columns, rows + 1)
        start = np.minimum(start, end)
        shape = (self.size, max(int((end - start).max(initial=0)), 1))
        weights, used = np.zeros(shape, self.weights.dtype), np.zeros(shape, bool)
        weights[columns, rows - start[columns]] = self.weights[rows, taps]
        used[columns, rows - start[columns]] = True
        return Band(results, start, weights, used)


def take(x: Array, dim: int, columns: Table) -> Array:
    """The elements at `columns` of a dimension."""
    step = np.diff(columns)
    if len(columns) and (step == step[:1]).all() and (len(columns) == 1 or step[0] > 0):
        stride = int(step[0]) if len(step) else 1
        return hlo.slice_in_dim(x, int(columns[0]), int(columns[-1]) + 1, stride, dim)
    repeats = len(columns) // x.shape[dim]
    if repeats and np.array_equal(columns, np.arange(x.shape[dim]).repeat(repeats)):
        shape = [*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]]
        spread = hlo.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != dim + 1])
        return spread.reshape(*x.shape[:dim], len(columns), *x.shape[dim + 1 :])
    others = [d for d in range(x.ndim) if d != dim]
    return structured.gather(
        x,
        hlo.constant(np.asarray(columns)[:, None], torch.int32),
        offset_dims=others,
        collapsed_slice_dims=[dim],
        start_index_map=[dim],
        slice_sizes=[1 if d == dim else size for d, size in enumerate(x.shape)],
        sorted_indices=bool((step >= 0).all()),
    )


def apply(x: Array, dim: int, band: Band) -> Array:
    """The product of a band with every line of `x` along `dim`."""
    results, width = band.used.shape
    columns = np.clip(band.start[:, None] + np.arange(width), 0, band.size - 1)
    if not x.size or not results:
        return hlo.zeros([results if d == dim else size for d, size in enumerate(x.shape)], x.dtype)
    if _evenly_spaced(band):
        return _windows(x, dim, band)
    if width > UNROLLED:
        windows = take(x, dim, columns.reshape(-1)).reshape(*x.shape[:dim], *columns.shape, *x.shape[dim + 1 :])
        return structured.reduce_sum(_weighted(windows, [dim, dim + 1], band.weights, band.used), [dim + 1])
    terms = (_weighted(take(x, dim, columns[:, t]), [dim], band.weights[:, t], band.used[:, t]) for t in range(width))
    return functools.reduce(hlo.add, terms)


def _evenly_spaced(band: Band) -> bool:
    """Whether a band sums windows of one length, cut only by the edges."""
    width = band.used.shape[1]
    columns = band.start[:, None] + np.arange(width)
    steps = np.diff(band.start)
    return bool(
        width > 1
        and (steps == steps[:1]).all()
        and (steps > 0).all()
        and (band.weights == band.used).all()
        and (band.used == ((columns >= 0) & (columns < band.size))).all()
    )


def _windows(x: Array, dim: int, band: Band) -> Array:
    """Sums of evenly spaced windows of one length."""
    width = band.used.shape[1]
    stride = int(band.start[1] - band.start[0]) if len(band.start) > 1 else 1
    low, high = -int(band.start[0]), int(band.start[-1]) + width - band.size
    return structured.reduce_window(
        [x],
        [hlo.constant(0, x.dtype)],
        hlo.add,
        window=_at(x.ndim, dim, width, 1),
        strides=_at(x.ndim, dim, stride, 1),
        padding=_at(x.ndim, dim, (low, high), (0, 0)),
    )[0]


def _at(ndim: int, dim: int, value: Any, other: Any) -> list[Any]:
    return [value if d == dim else other for d in range(ndim)]


def _weighted(x: Array, dims: Sequence[int], weights: Table, used: Table) -> Array:
    shape = [x.shape[d] if d in dims else 1 for d in range(x.ndim)]
    if not (weights == used).all():
        x = x * hlo.constant(weights.reshape(shape), x.dtype)
    return x if used.all() else hlo.select(hlo.constant(used.reshape(shape), torch.bool), x, 0)
