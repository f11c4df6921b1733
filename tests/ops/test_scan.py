"""Cumulative operators against the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tools.compare import check, check_opinfo, forms_for_tpus

NAN, INF = math.nan, math.inf
F32, BF16, I64, BOOL, C64 = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("cumsum", (F32, BF16, I64, C64)),
        ("cumprod", (F32, I64)),
        ("cummax", (F32, BF16, I64, BOOL)),
        ("cummin", (F32, I64)),
        ("cumulative_trapezoid", (F32,)),
    ],
)
def test_database(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_opinfo(name, dtypes, samples=5)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64, C64])
def test_logcumsumexp(dtype: torch.dtype) -> None:
    check_opinfo("logcumsumexp", (dtype,), samples=5, grad=False)


def test_logcumsumexp_gradient() -> None:
    # PyTorch's formula subtracts cumulative results of logarithms, which float32 can't hold to the default tolerance
    # (the CPU accumulates in float64).
    check(lambda x: x.logcumsumexp(1), torch.randn(3, 7, requires_grad=True), rtol=1e-4, atol=1e-4)


def test_logcumsumexp_special_values() -> None:
    for values in ([-INF, -INF, 1.0, NAN, 2.0], [-INF, INF, 1.0], [1000.0, 1000.0, -1000.0]):
        check(lambda x: x.logcumsumexp(0), torch.tensor(values))


@pytest.mark.parametrize("dtype", [F32, C64])
def test_logcumsumexp_on_tpus(dtype: torch.dtype) -> None:
    """It adds by doubling there: the compiler has no windows that are reduced by a function of one's own."""
    with forms_for_tpus() as programs:
        for length in (1, 2, 7, 16):
            x = torch.randn(3, length, 2, dtype=dtype)
            x[0, 0] = -INF
            check(lambda x: x.logcumsumexp(1), x, rtol=1e-5, atol=1e-5)
        check(lambda x: x.logcumsumexp(-1), torch.tensor([-INF, -INF, 1.0, NAN, 2.0]))
    assert programs
    assert not any("reduce_window" in text for _, text in programs)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_running_extremes(dtype: torch.dtype) -> None:
    """The last of equal elements counts, and NaN, once met, stays."""
    x = torch.tensor([[1, 1, 0, 2, 2], [NAN, 3, NAN, 1, 5], [-INF, -INF, INF, INF, -INF], [0.0, -0.0, 0.0, 1, -1]])
    check(lambda x: [x.cummax(1), x.cummin(1), x.cummax(0)], x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, BOOL, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([100, 100, 0, 1, 5]).to(dtype)
    check(lambda x: [x.cumsum(0), x.cumprod(0), x.cummax(0), x.cummin(0), x.cumsum(0, dtype=torch.int8)], x)


def test_empty_and_0d() -> None:
    for x in (torch.zeros(3, 0), torch.zeros(0, 3), torch.tensor(2.5)):
        check(lambda x: [x.cumsum(-1), x.cumprod(0), x.cummax(-1), x.cummin(0), x.logcumsumexp(-1)], x)


def test_product_gradient_at_zeros() -> None:
    x = torch.tensor([2.0, 0.0, 3.0, 0.0])
    check(lambda x: [x.cumprod(0), x[:3].prod(), x[2:].prod()], x.requires_grad_())


def test_in_place_and_strides() -> None:
    check(lambda x: x.cumsum_(0), torch.randn(3, 4))
    check(lambda x: [x.t().cumsum(0), x.t().cummax(1)], torch.randn(3, 4))


def test_long_sums_are_accurate() -> None:
    """Partial sums are combined in a tree: the error doesn't grow with the length as in a running float32 sum."""
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    got = x.to("tpu").cumsum(0).cpu().double()
    want = x.double().cumsum(0)
    assert ((got - want).abs() / want).max() < 1e-6
    wide = torch.full((1000,), 2**40)
    check(lambda x: x.cumsum(0), wide)


def test_large_rows() -> None:
    check(lambda x: [x.cummax(1), x.logcumsumexp(1)], torch.randn(512, 1024), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod, torch.cummax, torch.cummin])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2**14 + 3,), 0),  # cut into blocks
        ((2**14 + 1, 1), 0),
        ((16, 33), 1),  # eight sequences at a time
        ((3, 5, 2, 1), 2),
        ((5, 33), 1),  # moved to the front
        ((4, 9, 3), 1),
        ((33, 1, 4), 0),
    ],
)
def test_every_order_of_a_scan(function: Any, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape) * 0.01 + 1
    x[(0,) * len(shape)] = -INF if function in (torch.cummax, torch.cummin) else -1
    check(lambda x: function(x, dim), x)
    check(lambda x: function(x, dim), torch.randint(-9, 9, shape))


def test_a_running_extreme_keeps_the_last_nan() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, NAN, 5.0, NAN, 2.0]]).repeat(8, 1)
    check(lambda x: x.cummax(1), x)
    check(lambda x: x.cummin(0), x[0])


def test_sums_accumulate_in_float64() -> None:
    check(lambda x: x.cumsum(0), torch.full((2**17,), 0.1), rtol=0, atol=0)
    check(lambda x: x.cumsum(-1), torch.randn(8, 20_000), rtol=0, atol=0)


def test_one_bool_is_its_own_sum_and_product() -> None:
    check(lambda x: [x.clone().cumsum_(0), x.clone().cumprod_(0)], torch.tensor(True))
    for device in ("cpu", "tpu"):
        with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
            torch.tensor([True, False], device=device).cumsum_(0)


@pytest.mark.parametrize("dtype", [I64, torch.float64])
def test_rows_of_64_bit_numbers(dtype: torch.dtype) -> None:
    """Rows of whole strides are scanned several elements at a time, each row anew."""
    x = torch.arange(1, 3 * 2 * 24 + 1).reshape(3, 2, 24).to(dtype) % 7 - 2
    check(lambda x: [x.cumsum(2), x.cumsum(1), x[:, :, :20].cumsum(2)], x)
    check(lambda x: [x.cumprod(2), x.reshape(-1).cumsum(0)], x.to(torch.int64) if dtype is I64 else x / 2)


def test_64_bit_sums_that_overflow_and_infinities() -> None:
    check(lambda x: x.cumsum(1), torch.full((2, 16), 2**61))
    x = torch.zeros(2, 16, dtype=torch.float64)
    x[0, 3], x[0, 11], x[1, 5] = INF, -INF, NAN
    check(lambda x: [x.cumsum(1), x.logcumsumexp(1)], x)
