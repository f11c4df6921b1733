"""Resizing in every mode, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo

SIZES = [
    ("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 1), ("nearest-exact", 2), ("nearest-exact", 3),
    ("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2),
]  # fmt: skip
# Weights are rounded in another order: a few units in the last place of values around 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def image(ndim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, *(7, 6, 5)[:ndim], dtype=dtype).requires_grad_()


def options(mode: str, align_corners: bool | None) -> dict[str, Any]:
    return {"mode": mode} if "nearest" in mode else {"mode": mode, "align_corners": align_corners}


@pytest.mark.parametrize("variant", ["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"])
def test_database(variant: str) -> None:
    check_opinfo("nn.functional.interpolate", variant=variant, samples=6, **CLOSE)


@pytest.mark.parametrize(("mode", "ndim"), SIZES)
@pytest.mark.parametrize("align_corners", [False, True])
def test_sizes(mode: str, ndim: int, align_corners: bool) -> None:
    if "nearest" in mode and align_corners:
        align_corners = False
    for size in (1, 4, 14, 7, (13, 6, 9)[:ndim]):
        check(F.interpolate, image(ndim), size=size, **options(mode, align_corners), **CLOSE)


@pytest.mark.parametrize(("mode", "ndim"), SIZES)
def test_scales(mode: str, ndim: int) -> None:
    for scale in (2.0, 0.5, 1.7, 0.3):
        check(F.interpolate, image(ndim), scale_factor=scale, **options(mode, False), **CLOSE)
    check(F.interpolate, image(ndim), scale_factor=2.3, recompute_scale_factor=True, **options(mode, False), **CLOSE)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_antialiased(mode: str, align_corners: bool) -> None:
    for size in ((3, 2), (11, 13), (2, 9), (7, 6)):
        check(
            lambda x: F.interpolate(x, size, mode=mode, antialias=True, align_corners=align_corners),  # noqa: B023
            image(2),
            **CLOSE,
        )
    check(lambda x: F.interpolate(x, scale_factor=0.41, mode=mode, antialias=True), image(2), **CLOSE)


def test_lanczos() -> None:
    check(lambda x: torch.ops.aten._upsample_lanczos2d_aa(x, [4, 9], False), torch.randn(2, 3, 11, 6), **CLOSE)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_bytes(mode: str) -> None:
    x = torch.randint(0, 256, (2, 3, 39, 38), dtype=torch.uint8)
    for size in ((51, 20), (13, 38), (20, 60)):
        check(F.interpolate, x, size=size, mode=mode)
        if "nearest" not in mode:
            check(F.interpolate, x, size=size, mode=mode, antialias=True)
            check(F.interpolate, x.repeat(1, 2, 1, 1), size=size, mode=mode, align_corners=True)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_low_precision_and_double(mode: str) -> None:
    check(F.interpolate, image(2, torch.float64), scale_factor=1.6, mode=mode)
    check(F.interpolate, image(2, torch.bfloat16), scale_factor=1.6, mode=mode, rtol=0.02, atol=0.05)


def test_infinity_stays_in_its_neighbourhood() -> None:
    x = torch.randn(1, 1, 8, 8)
    x[0, 0, 3, 3], x[0, 0, 6, 1] = float("inf"), float("nan")
    check(F.interpolate, x, size=(16, 5), mode="bilinear")
    check(F.interpolate, x, size=(5, 12), mode="nearest")


def test_channels_last_strides() -> None:
    x = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    for mode in ("nearest", "bilinear", "bicubic"):
        check(F.interpolate, x, scale_factor=2, mode=mode, **CLOSE)


def test_large_reduction() -> None:
    x = torch.randn(1, 2, 200, 64).requires_grad_()
    check(lambda x: F.interpolate(x, (7, 5), mode="bilinear", antialias=True), x, **CLOSE)
    check(F.interpolate, x, size=(9, 9), mode="area", **CLOSE)
