"""Scatter, index_add and kin, masked fills, writes of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import check, check_opinfo
from torch_tpu import metrics

f32, f64, bf16, i64, b8, c64 = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.parametrize(
    "name",
    [
        "scatter",
        "scatter_add",
        "index_add",
        "index_copy",
        "index_fill",
        "masked_fill",
        "masked_scatter",
        "select_scatter",
        "slice_scatter",
        "diagonal_scatter",
        "as_strided_scatter",
    ],
)
def test_sample_inputs(name: str) -> None:
    check_opinfo(name, (f32,), samples=10)
    check_opinfo(name, (bf16, i64, b8, c64), samples=2)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_scatter_reduce(reduce: str) -> None:
    check_opinfo("scatter_reduce", (f32,), variant=reduce, samples=8)
    check_opinfo("scatter_reduce", (f64, i64, b8), variant=reduce, samples=2)
    # The CPU rounds every product to bfloat16, the device the last one.
    check_opinfo("scatter_reduce", (bf16,), variant=reduce, samples=2, rtol=0.03, atol=0.03)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", REDUCTIONS[1:])
def test_index_reduce(reduce: str) -> None:
    check_opinfo("index_reduce", (f32,), variant=reduce, samples=8)
    check_opinfo("index_reduce", (f64, i64), variant=reduce, samples=2)


def test_many_updates_of_one_element() -> None:
    def run(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.scatter(0, index, source),
            x.scatter_add(0, index, source),
            x.index_add(0, index, source, alpha=0.5),
            x.index_copy(0, index, source),
        ]

    index = torch.randint(0, 5, (3000,), generator=torch.Generator().manual_seed(1))
    check(run, torch.randn(5), index, torch.randn(3000), atol=1e-4, rtol=1e-4)


def test_sources_larger_than_the_index() -> None:
    def run(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.scatter(1, index, source),
            x.scatter(0, index, 2.5),
            x.scatter_add(1, index, source),
            x.scatter(1, index, source, reduce="add"),
            x.scatter(1, index, 3.0, reduce="multiply"),
            x.clone().scatter_(-1, index, source),
            x.scatter_reduce(1, index, source, "mean", include_self=False),
        ]

    check(run, torch.randn(4, 5), torch.tensor([[0, 2], [2, 2], [1, 0]]), torch.randn(6, 7))


def test_reduction_without_the_old_elements() -> None:
    def run(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [x.scatter_reduce(0, index, source, r, include_self=s) for r in REDUCTIONS for s in (True, False)]

    index = torch.tensor([0, 0, 3, 3, 3])
    check(run, torch.tensor([1.0, float("nan"), -2, 5]), index, torch.tensor([2.0, -3, float("nan"), 1, float("inf")]))
    check(run, torch.tensor([1, 7, -2, 5]), index, torch.tensor([2, -4, -3, -1, -1]))


def test_in_place_and_zero_dimensional() -> None:
    def run(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        x.t()[1:].index_fill_(0, i, 4)
        x[:, 0].index_add_(0, i, x[0, 1:2].clone())
        x.index_copy_(1, i, x[:, 2:].clone())
        x.masked_fill_(x > 1.5, float("-inf"))
        s = x[0, 0].clone()
        return [
            x * 1,
            s.index_fill(0, i * 0, 2.0),
            s.scatter(0, i[0] * 0, 3.0),
            s.gather(0, i[0] * 0),
            s.index_select(0, i * 0),
            s.masked_fill(s < 0, 1),
            s.scatter_add(0, i[0] * 0, s),
        ]

    check(run, torch.randn(2, 3), torch.tensor([1]))


def test_gradients_of_masked_operators() -> None:
    def run(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.masked_fill(mask, 2.0),
            x.masked_fill(mask, source[0]),
            x.masked_scatter(mask, source),
            x.masked_select(mask),
            torch.where(mask, x, source[:4]),
        ]

    mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
    check(run, torch.randn(2, 4, requires_grad=True), mask, torch.randn(7, requires_grad=True))


def test_masks_broadcast() -> None:
    def run(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        return [x.masked_fill(mask, 3), x.masked_scatter(mask, source), x[:1].masked_fill(mask, 1)]

    check(run, torch.arange(12).reshape(3, 4), torch.tensor([[True], [False], [True]]), torch.arange(20))


def test_a_number_to_fill_with_does_not_recompile() -> None:
    x = torch.randn(3, 4, device="tpu")
    index = torch.tensor([[0, 2, 1, 1]], device="tpu")
    x.masked_fill(x > 0, 0.5), x.scatter(0, index, 0.5), x.index_fill(0, index[0], 0.5)
    before = metrics.counters().get("program", 0)
    for number in (1.5, -3.0, float("inf")):
        assert x.masked_fill(x > 0, number).max().item() in (number, x.max().item()) or number < 0
        assert x.scatter(0, index, number)[2, 1].item() == number
        assert (x.index_fill(0, index[0], number) == number).all().item()
    assert metrics.counters().get("program", 0) <= before + 6  # the reading of the results


def test_views_written_by_position() -> None:
    def run(x: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.select_scatter(x, row, 0, -1),
            torch.slice_scatter(x, row[None].expand(2, -1), 0, 1, 4, 2),
            torch.slice_scatter(x, x[-2:], 0, -2),
            x[1:4:2],
            x[-1] * x[0],
            x[:, 1::3],
        ]

    check(run, torch.randn(5, 6, requires_grad=True), torch.randn(6, requires_grad=True))


BAD = [
    (
        "scatter",
        lambda x, i: x.scatter_(0, i[None], 1.0),
        RuntimeError,
        "index 5 is out of bounds for dimension 0 with size 3",
    ),
    (
        "negative",
        lambda x, i: x.scatter_(0, i[None] - 6, 1.0),
        RuntimeError,
        "index -1 is out of bounds for dimension 0",
    ),
    (
        "add",
        lambda x, i: x.scatter_add_(0, i[None], x.clone()),
        RuntimeError,
        "index 5 is out of bounds for dimension 0 with size 3",
    ),
    (
        "index_add",
        lambda x, i: x.index_add_(0, i, x[:1].clone()),
        RuntimeError,
        "index 5 is out of bounds for dimension 0",
    ),
    (
        "index_copy",
        lambda x, i: x.index_copy_(0, i, x[:1].clone()),
        IndexError,
        "index_copy_.*: index 5 is out of bounds",
    ),
    (
        "index_fill",
        lambda x, i: x.index_fill_(0, i, 1.0),
        IndexError,
        "index 5 is out of bounds for dimension 0 with size 3",
    ),
    ("float index", lambda x, i: x.index_fill_(0, i.float(), 1.0), IndexError, "Expected dtype int64 for index"),
    (
        "short source",
        lambda x, i: x.masked_scatter_(x >= 0, x[0]),
        RuntimeError,
        "Number of elements of source < number",
    ),
    ("dtype", lambda x, i: x.index_add_(0, i * 0, i[None]), RuntimeError, "must have the same scalar type"),
    (
        "slice",
        lambda x, i: x.slice_scatter(x[:, :1], 0),
        RuntimeError,
        "expected src to have a size equal to the slice",
    ),
    ("mask", lambda x, i: x.masked_fill(i, 0), RuntimeError, "bool"),
]


@pytest.mark.parametrize(("function", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_wrong_arguments(function: Callable[..., Any], error: type[Exception], message: str) -> None:
    x = torch.arange(12.0, device="tpu").reshape(3, 4)
    with pytest.raises(error, match=message):
        function(x, torch.tensor([5], device="tpu"))
    assert torch.equal(x.cpu(), torch.arange(12.0).reshape(3, 4)), "written although an argument was wrong"
