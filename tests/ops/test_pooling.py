"""Average and maximum pooling, adaptive and fractional, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo

LOW = (torch.float32, torch.bfloat16)
INF, NAN = float("inf"), float("nan")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"])
def test_database(kind: str, ndim: int) -> None:
    # A bfloat16 gradient is a sum over windows, which the CPU rounds after every addition.
    check_opinfo(f"nn.functional.{kind}{ndim}d", (torch.float32,), samples=5)
    check_opinfo(f"nn.functional.{kind}{ndim}d", (torch.bfloat16,), samples=2, rtol=0.05, atol=0.02)
    check_opinfo(f"nn.functional.{kind}{ndim}d", (torch.int64,), samples=2)


@pytest.mark.parametrize(
    "name", ["fractional_max_pool2d", "fractional_max_pool3d", "max_unpool1d", "max_unpool2d", "max_unpool3d"]
)
def test_database_inverse_and_random(name: str) -> None:
    if name.startswith("max_unpool"):
        # PyTorch's meta kernel, which says how results are laid out, doesn't know of channels-last here.
        check_opinfo(f"nn.functional.{name}", samples=3, strides=False)
        return
    # The samples draw their random windows on each device by itself; so give them.
    ndim = int(name[-2])
    for sizes, kernel, result in (((9, 7, 8), 2, 3), ((6, 6, 6), 3, 1), ((5, 5, 5), 1, 4)):
        x = leaf(2, 3, *sizes[:ndim])
        samples = torch.rand(2, 3, ndim)
        function = getattr(F, f"{name}_with_indices")
        check(lambda x, s: function(x, kernel, result, _random_samples=s), x, samples)  # noqa: B023


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    [
        (2, 2, 0, 1, False),
        (3, 2, 1, 1, True),
        (3, 1, 1, 2, False),
        (2, 3, 1, 3, True),
        (5, 5, 2, 1, True),
        (1, 2, 0, 1, True),
    ],
)
def test_max_pool(ndim: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> None:
    # Case 42: ceil_mode's last window may hang over the edge, but never starts behind it.
    x = leaf(2, 3, *(9, 8, 7)[:ndim])
    function = getattr(F, f"max_pool{ndim}d")
    check(lambda x: function(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True), x)


def test_max_pool_ties_nan_and_minus_infinity() -> None:
    x = torch.zeros(1, 2, 6, 6)
    x[0, 0, 1, 1], x[0, 0, 2, 3], x[0, 0, 3, 3] = NAN, NAN, INF
    x[0, 1] = -INF
    for options in ((3, 2, 1), (2, 2, 0), (3, 1, 1, 2)):
        check(lambda x: F.max_pool2d(x, *options, return_indices=True), x)  # noqa: B023
    check(lambda x: F.adaptive_max_pool2d(x, (4, 1), return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 3, 3, return_indices=True), torch.full((1, 1, 6, 6), 7))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64])
def test_max_pool_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(-60, 12).reshape(2, 1, 6, 6).to(dtype)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)


def test_max_pool_of_a_large_window() -> None:
    x = leaf(2, 2, 40, 30)
    check(lambda x: F.max_pool2d(x, (40, 30), return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 20, 9, padding=10, return_indices=True), x)
    check(lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), x)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil_mode"),
    [(2, 2, 0, False), (3, 2, 1, True), (3, 1, 1, False), (2, 3, 1, True), (7, 2, 3, True), (1, 2, 0, True)],
)
def test_avg_pool(ndim: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_include_pad: bool) -> None:
    x = leaf(2, 3, *(9, 8, 7)[:ndim])
    check(getattr(F, f"avg_pool{ndim}d"), x, kernel, stride, padding, ceil_mode, count_include_pad)


@pytest.mark.parametrize("divisor", [1, 5, -3])
def test_avg_pool_divisor(divisor: int) -> None:
    check(lambda x: F.avg_pool2d(x, (3, 2), divisor_override=divisor, padding=1), leaf(2, 3, 8, 7))
    check(lambda x: F.avg_pool3d(x, 2, divisor_override=divisor, ceil_mode=True), leaf(2, 3, 5, 5, 5))


def test_avg_pool_keeps_infinity_in_its_windows() -> None:
    x = torch.randn(1, 1, 9, 9)
    x[0, 0, 2, 2], x[0, 0, 7, 7] = INF, NAN
    check(lambda x: F.avg_pool2d(x, 3, 2, 1), x)
    check(lambda x: F.adaptive_avg_pool2d(x, (4, 5)), x)


@pytest.mark.parametrize("size", [1, 3, 5, 12, (None, 2), (40, 1)])
def test_adaptive(size: Any) -> None:
    x = leaf(2, 3, 30, 7)
    check(F.adaptive_avg_pool2d, x, size)
    check(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), x)


def test_unpool_rejects_positions_outside() -> None:
    x, indices = torch.ones(1, 1, 1, 2, device="tpu"), torch.tensor([[[[0, 99]]]], device="tpu")
    with pytest.raises(RuntimeError, match="invalid max index"):
        F.max_unpool2d(x, indices, 2).cpu()


@pytest.mark.parametrize("shape", [(3, 8, 8), (0, 3, 8, 8)])
def test_without_batch_and_empty(shape: tuple[int, ...]) -> None:
    x = leaf(*shape)
    check(lambda x: F.max_pool2d(x, 3, 2, return_indices=True), x)
    check(F.avg_pool2d, x, 3, 2)
    check(F.adaptive_avg_pool2d, x, 3)
    check(lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), x)


@pytest.mark.parametrize("function", [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1)])
def test_channels_last_strides(function: Any) -> None:
    check(function, torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_gradient_of_windows_side_by_side(ceil_mode: bool) -> None:
    x = torch.randn(2, 3, 7, 8)
    x[0, 0], x[0, 1], x[1, 0, 2] = -torch.inf, 1, torch.nan
    check(lambda x: F.max_pool2d(x, (2, 3), ceil_mode=ceil_mode), x.requires_grad_())
    check(lambda x: F.max_pool1d(x, 3, ceil_mode=ceil_mode), torch.randn(2, 11, requires_grad=True))
    check(lambda x: F.max_pool3d(x, 2, ceil_mode=ceil_mode), torch.randn(1, 2, 5, 4, 3, requires_grad=True))
    check(lambda x: F.max_pool2d(x, 2, ceil_mode=ceil_mode), torch.randn(3, 5, 5).bfloat16().requires_grad_())


def test_fractional_pooling_of_no_batch() -> None:
    for size in ((0, 1, 4, 5, 4), (0, 2, 6, 6)):
        pool = (
            torch.nn.functional.fractional_max_pool3d if len(size) == 5 else torch.nn.functional.fractional_max_pool2d
        )
        check(lambda x, pool=pool: pool(x, 2, output_size=2), torch.randn(size, requires_grad=True))


def test_fractional_pooling_takes_the_first_of_too_many_samples() -> None:
    for pool, size in ((F.fractional_max_pool2d, (7, 6)), (F.fractional_max_pool3d, (7, 6, 5))):
        for planes, samples in (((4,), (2, 4)), ((2, 4), (3, 4))):
            check(
                lambda x, s, pool=pool: pool(x, 2, output_size=3, return_indices=True, _random_samples=s),
                torch.randn(*planes, *size, requires_grad=True),
                torch.rand(*samples, len(size)),
            )
