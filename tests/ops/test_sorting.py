"""Order, search and histograms against the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import check, check_opinfo, no_fallback

NAN, INF = math.nan, math.inf
F32, BF16, F64, I64, BOOL = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool
SPECIAL = torch.tensor([[1.0, NAN, 3.0, -INF, NAN], [2.0, 5.0, 4.0, 5.0, INF], [-0.0, 0.0, -0.0, INF, -1.0]])


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("msort", (F32, I64)),
        ("argsort", (F32,)),
        ("topk", (F32, F64)),
        ("kthvalue", (F32, F64)),
        ("median", (F32, I64)),
        ("nanmedian", (F32,)),
        ("quantile", (F32,)),
        ("nanquantile", (F32,)),
        ("searchsorted", (F32, I64)),
        ("bucketize", (F32, I64)),
        ("histc", (F32, F64)),
        ("histogram", (F32,)),
        ("isin", (F32, I64)),
    ],
)
def test_database(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_opinfo(name, dtypes, samples=5)


def _ties_at_length(sample: object) -> bool:
    """Long samples with equal elements: the CPU's unstable sort leaves them in an order of its own."""
    return sample.input.numel() > 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["sort", "mode"])
@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL])
def test_database_short(name: str, dtype: torch.dtype) -> None:
    check_opinfo(name, (dtype,), samples=5, skip=_ties_at_length)


@pytest.mark.parametrize(
    "dtype",
    [F32, BF16, torch.float16, F64, BOOL, torch.uint8, torch.int8, torch.int16, torch.int32, I64],
)
@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(dtype: torch.dtype, descending: bool) -> None:
    x = torch.randint(-3, 4, (3, 400)).to(dtype)
    check(lambda x: x.sort(dim=1, descending=descending, stable=True), x)
    check(lambda x: x.sort(dim=0, descending=descending, stable=True), x)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_special_values(dtype: torch.dtype) -> None:
    """NaN sorts last and counts as the largest, -0.0 equals 0.0 and keeps its place and its sign."""
    x = SPECIAL.to(dtype)
    check(lambda x: [x.sort(dim=1, stable=True), x.sort(dim=1, descending=True, stable=True)], x)
    check(lambda x: [x.median(1), x.mode(1)], x)
    check(lambda x: [x.nanmedian(1), x.median(), x.nanmedian(), x.kthvalue(2)[0]], x)
    check(lambda x: [x.topk(3)[0], x.topk(4, largest=False)[0]], x)
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0], dtype=dtype)
    values, order = zeros.to("tpu").sort(stable=True)
    assert order.tolist() == [0, 1, 2, 3]
    assert torch.equal(values.cpu().signbit(), zeros.signbit())


def test_extreme_integers() -> None:
    x = torch.tensor([2**33, -(2**33), 5, 2**33 + 1, -1, 2**62, -(2**63), 2**63 - 1])
    check(
        lambda x: [x.sort(), x.sort(descending=True), x.topk(3), x.topk(2, largest=False), x.median(), x.kthvalue(2)], x
    )
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    check(lambda x: [x.sort(), x.sort(descending=True), x.topk(2)], torch.tensor([0, high, low, -1], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, I64, torch.float16, BF16])
def test_topk_of_distinct_values(dtype: torch.dtype) -> None:
    x = torch.stack([torch.randperm(100) for _ in range(4)]).to(dtype)
    check(lambda x: [x.topk(7), x.topk(7, largest=False), x.topk(3, 0)[0], x.t().topk(5, 0)], x)


@pytest.mark.parametrize("dtype", [F32, BF16, F64, torch.uint8, torch.int32, I64])
@pytest.mark.parametrize("dim", [0, 1])
def test_place_of_order_statistics(dtype: torch.dtype, dim: int) -> None:
    """Among equal elements it is the one that a stable sort puts there, whichever the CPU takes."""
    x = torch.randint(-5, 6, (130, 131)).to(dtype)
    if dtype is I64:
        x = x * (2**61)  # the differences overflow
    if dtype.is_floating_point:
        x[3, :90], x[:70, 5] = NAN, -INF
    order = x.sort(dim=dim, stable=True)[1]
    nans = x.isnan().sum(dim, keepdim=True)
    size = x.shape[dim]
    middle = torch.where(nans > 0, size - nans, (size - 1) // 2)
    got = x.to("tpu")
    for values, places, position in (
        (*got.median(dim, keepdim=True), middle),
        (*got.nanmedian(dim, keepdim=True), ((size - 1 - nans) // 2).clamp(min=0)),
        (*got.kthvalue(100, dim, keepdim=True), torch.full_like(middle, 99)),
        (*got.kthvalue(7, dim, keepdim=True), torch.full_like(middle, 6)),
    ):
        want = order.gather(dim, position)
        assert torch.equal(places.cpu(), want)
        assert torch.equal(values.cpu().nan_to_num(1e3), x.gather(dim, want).nan_to_num(1e3))


def test_gradients() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    check(lambda x: [x.sort(1)[0], x.topk(2)[0], x.kthvalue(3)[0], x.median(0)[0], x.mode(1)[0], x.median()], x)


def test_empty_and_0d() -> None:
    check(lambda x: [x.sort(1), x.topk(0, 1), x.sort(0)], torch.zeros(3, 0))
    check(lambda x: [x.median(), x.nanmedian()], torch.zeros(0))
    check(lambda x: [x.sort(), x.topk(1), x.kthvalue(1), x.median(0), x.mode(), x.median()], torch.tensor(2.5))


@pytest.mark.parametrize("function", [lambda x: x.topk(9), lambda x: x.kthvalue(9), lambda x: x.kthvalue(0)])
def test_k_out_of_range(function: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="range"):
        function(torch.zeros(3, device="tpu"))


def test_complex_has_no_order() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, dtype=torch.complex64, device="tpu").sort()


def test_out() -> None:
    check(
        lambda x, v, i: torch.sort(x, 0, out=(v, i)), torch.randn(3, 4), torch.zeros(3, 4), torch.zeros(3, 4, dtype=I64)
    )


# --- search ------------------------------------------------------------------------------------------------------


def test_searchsorted() -> None:
    values = torch.tensor([0.0, 1.0, 3.0, 8.0, NAN, INF])
    check(
        lambda s, v: [torch.searchsorted(s, v, right=r) for r in (False, True)],
        torch.tensor([1.0, 3.0, 3.0, 7.0, NAN]),
        values,
    )
    check(
        lambda s, v, o: torch.searchsorted(s, v, sorter=o, side="right", out_int32=True),
        torch.tensor([7.0, 1.0, 3.0, 3.0]),
        torch.tensor([[0.0, 1.0], [3.0, 8.0]]),
        torch.tensor([1, 2, 3, 0]),
    )
    check(torch.searchsorted, torch.tensor([[1, 3, 5], [2, 4, 6]]), torch.tensor([[3, 9], [1, 4]]))
    check(
        lambda s: [torch.searchsorted(s, 3.5), torch.searchsorted(s, 3), torch.bucketize(2.5, s)],
        torch.tensor([1, 3, 5]),
    )
    check(torch.searchsorted, torch.zeros(0), torch.randn(3))
    check(torch.searchsorted, torch.randn(3), torch.zeros(0, 2))
    big = torch.tensor([-(2**62), 5, 2**33, 2**33 + 1])
    check(torch.searchsorted, big, big + 1)


def test_isin() -> None:
    check(
        lambda a, b: [torch.isin(a, b), torch.isin(a, b, invert=True), torch.isin(a, 2), torch.isin(2, b)],
        torch.randint(0, 5, (3, 4)),
        torch.tensor([0, 2]),
    )
    nan = torch.tensor([NAN])
    check(
        lambda a, b: [torch.isin(a, b), torch.isin(b, a)],
        torch.cat([torch.arange(300.0), nan]),
        torch.cat([torch.arange(0.0, 900.0, 3.0), nan, nan]),
    )
    check(lambda a, b: [torch.isin(a, b), torch.isin(b, a)], torch.arange(3), torch.zeros(0, dtype=I64))


def test_histograms() -> None:
    x, w = torch.randn(50, generator=torch.Generator().manual_seed(1)), torch.rand(50)
    check(
        lambda t: [torch.histc(t, 4, 0, 4), torch.histc(t, 4), torch.histc(t, 4, 1, 1)], torch.tensor([1.0, 2, 2, 4, 9])
    )
    check(lambda t: torch.histc(t, 4), torch.ones(3))
    check(lambda t: torch.histc(t, 4), torch.zeros(0))
    check(
        lambda x, w: [
            torch.histogram(x, 3, weight=w),
            torch.histogram(x, 3, range=(0.0, 1.0), density=True),
            torch.histogram(x, 3),
        ],
        x,
        w,
    )
    check(torch.histogram, x, torch.tensor([-1.0, 0.0, 0.3, 1.0]))
    check(lambda t: torch.histogram(t, 3), torch.ones(5))
    # The CPU refuses integers, CUDA doesn't; Transformers counts with them wherever it is not on a CPU.
    assert torch.histc(torch.tensor([1, 2, 2, 4], device="tpu"), 4, 0, 4).tolist() == [0, 1, 2, 1]


def test_histogram_errors() -> None:
    with no_fallback():
        with pytest.raises(RuntimeError, match="not finite"):
            torch.histc(torch.tensor([1.0, NAN], device="tpu"), 4)
        with pytest.raises(RuntimeError, match="not finite"):
            torch.histc(torch.tensor([1.0], device="tpu"), 4, min=-INF, max=1)
        with pytest.raises(RuntimeError, match="max must be larger than min"):
            torch.histc(torch.tensor([1.0], device="tpu"), 4, min=3, max=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("out_int32", [False, True])
def test_rows_of_sparse_matrices(dtype: torch.dtype, out_int32: bool) -> None:
    rows = torch.tensor([0, 0, 2, 3, 3, 3], dtype=dtype)
    check(lambda r: torch._convert_indices_from_coo_to_csr(r, 5, out_int32=out_int32), rows)
    beginnings, columns = torch.tensor([0, 2, 2, 3], dtype=dtype), torch.tensor([1, 2, 0], dtype=dtype)
    for transpose in (False, True):
        options = {"out_int32": out_int32, "transpose": transpose}
        check(torch._convert_indices_from_csr_to_coo, beginnings, columns, **options)
        batch = torch.stack([beginnings, torch.tensor([0, 0, 1, 3], dtype=dtype)])
        check(torch._convert_indices_from_csr_to_coo, batch, torch.stack([columns, columns.flip(0)]), **options)


@pytest.mark.parametrize("bits", [8, 40, 63])
def test_long_integers_of_any_range(bits: int) -> None:
    # Above 4,096 elements, numbers of few bits are sorted packed with their positions.
    x = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 1000))
    for descending in (False, True):
        check(lambda x, d=descending: x.sort(dim=1, descending=d, stable=True), x)
    check(lambda x: x.sort(dim=0, stable=True), x)
    check(lambda x: x.unique(return_inverse=True, return_counts=True), x)
    extremes = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, 0, -1]).repeat(2000)
    check(lambda x: x.sort(stable=True), extremes)


@pytest.mark.parametrize("number", [True, 1 + 1j, 2.5])
def test_one_number_needs_no_order(number: Any) -> None:
    """The CPU returns a tensor without dimensions as it is, even where its dtype is refused otherwise."""
    check(lambda x: (x.kthvalue(1, 0), x.mode(0), x.cummax(0), x.cummin(0)), torch.tensor(number))


def test_kthvalue_of_long_rows() -> None:
    x = torch.randn(3, 200)
    x[0, :5], x[1, :190], x[2, ::3] = torch.nan, -0.0, -torch.inf
    for k in (1, 7, 64, 65, 200):
        check(lambda x, k=k: x.kthvalue(k, 1)[0], x)
        check(lambda x, k=k: x.t().kthvalue(k, 0)[0], x.bfloat16())
        check(lambda x, k=k: x.kthvalue(k, 1), torch.randperm(200).reshape(1, 200).to(torch.int16))


def test_many_rows_are_sorted_in_two_halves() -> None:
    x = torch.randn(3, 5, 4096)
    x[1, 2, 7] = NAN
    check(lambda x: [*x.sort(-1), *x.sort(1, descending=True), *x.sort(0), x.median(-1).values], x)
    check(lambda x: x.sort(dim=-1, stable=True), torch.randint(0, 9, (2, 2**15)))
