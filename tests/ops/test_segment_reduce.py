"""Reductions over segments."""

from __future__ import annotations

import math

import pytest
import torch

from tools.compare import check, check_opinfo

REDUCTIONS = ["sum", "mean", "prod", "max", "min"]


@pytest.mark.parametrize("variant", ["lengths", "offsets"])
def test_samples(variant: str) -> None:
    check_opinfo("_segment_reduce", variant=variant, samples=5)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_ties_zeros_and_empty_segments(reduce: str) -> None:
    """Gradients of both signs."""
    data = torch.tensor([[2.0, 0], [2, 3], [0, 0], [-1, 4], [4, 4], [5, 0], [7, 0]], requires_grad=True)
    lengths = torch.tensor([3, 0, 4])
    check(lambda d, n: torch.segment_reduce(d, reduce, lengths=n), data, lengths)
    check(lambda d, n: torch.segment_reduce(d, reduce, lengths=n, initial=2.5), data, lengths)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nan(reduce: str) -> None:
    data = torch.tensor([1.0, math.nan, 3, 0, 5, math.nan, math.nan, 2], requires_grad=True)
    check(lambda d, n: torch.segment_reduce(d, reduce, lengths=n), data, torch.tensor([3, 2, 3]))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_each_row_with_lengths_of_its_own(reduce: str) -> None:
    data = torch.arange(1.0, 25).reshape(2, 6, 2).requires_grad_()
    lengths = torch.tensor([[1, 2, 3], [4, 0, 2]], dtype=torch.int32)
    check(lambda d, n: torch.segment_reduce(d, reduce, lengths=n, axis=1), data, lengths)


def test_wrong_lengths() -> None:
    data = torch.arange(6.0)
    for lengths in ([1, 2], [-1, 7]):
        with pytest.raises(RuntimeError):
            torch.segment_reduce(data, "sum", lengths=torch.tensor(lengths))
        with pytest.raises(RuntimeError):
            torch.segment_reduce(data.tpu(), "sum", lengths=torch.tensor(lengths, device="tpu"))


def test_unsafe_leaves_out_what_no_segment_has() -> None:
    data = torch.arange(6.0, requires_grad=True)
    check(lambda d, n: torch.segment_reduce(d, "sum", lengths=n, unsafe=True), data, torch.tensor([1, 2]))
