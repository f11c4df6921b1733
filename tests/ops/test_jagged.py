"""Packed and padded rows."""

from __future__ import annotations

import torch

from tools.compare import check, no_fallback

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 2, 2, 7, 8])


def test_padded() -> None:
    """An empty row, and one that is cut."""
    values = torch.arange(24.0).reshape(8, 3)
    for length in (3, 6):
        check(lambda v, o, n=length: aten._jagged_to_padded_dense_forward(v, [o], [n], -1.0), values, OFFSETS)


def test_packed() -> None:
    dense = torch.arange(60.0).reshape(4, 5, 3)
    check(lambda d, o: aten._padded_dense_to_jagged_forward(d, [o], 8), dense, OFFSETS)
    check(lambda d, o: aten._padded_dense_to_jagged_forward(d, [o]), dense, OFFSETS)


def test_there_and_back() -> None:
    values = torch.arange(24.0, device="tpu").reshape(8, 3)
    offsets = OFFSETS.tpu()
    with no_fallback():
        padded = aten._jagged_to_padded_dense_forward(values, [offsets], [5])
        torch.testing.assert_close(aten._padded_dense_to_jagged_forward(padded, [offsets]), values)
