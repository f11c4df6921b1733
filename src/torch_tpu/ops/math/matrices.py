"""Small functions of (batches of) matrices that the factorisations share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array


def eye(m: int, n: int, dtype: torch.dtype) -> Array:
    """Ones on the diagonal."""
    return hlo.convert(hlo.iota((m, n), 0).eq(hlo.iota((m, n), 1)), dtype)


def eye_of(shape: Sequence[int], dtype: torch.dtype) -> Array:
    """The same for each of a batch."""
    return hlo.broadcast_to(eye(shape[-2], shape[-1], dtype), shape)


def triangle(x: Array, *, upper: bool, diagonal: int = 0) -> Array:
    """The entries on and above (or below) a diagonal, zeros elsewhere."""
    rows, columns = (hlo.iota(x.shape[-2:], d) for d in range(2))
    kept = columns - rows >= diagonal if upper else columns - rows <= diagonal
    return hlo.select(kept, x, 0)


def adjoint(x: Array) -> Array:
    """The conjugate transpose of each matrix."""
    return hlo.conj(hlo.transpose(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]))


def broadcast_batch(*arrays: Array) -> list[Array]:
    """The arrays with their dimensions before the last two broadcast to each other."""
    batch = hlo.broadcast_shapes(*(a.shape[:-2] for a in arrays))
    return [hlo.broadcast_to(a, (*batch, *a.shape[-2:])) for a in arrays]


def diagonal(x: Array) -> Array:
    """The diagonal of each matrix."""
    m, n = x.shape[-2:]
    on_it = hlo.iota((m, n), 0).eq(hlo.iota((m, n), 1))
    return structured.reduce_sum(hlo.select(on_it, x, 0), [x.ndim - 2 if m > n else x.ndim - 1])
