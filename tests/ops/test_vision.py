"""Sampling at given places, blocks of images, and rearrangements of pixels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo

# Differences of neighbouring weights, rounded in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


def test_database_grid_sample() -> None:
    check_opinfo("nn.functional.grid_sample", samples=4, **CLOSE)
    check_opinfo("grid_sampler_2d", samples=3, **CLOSE)
    check_opinfo("grid_sampler_3d", samples=4, **CLOSE)


@pytest.mark.parametrize("name", ["unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"])
def test_database(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", samples=6)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_grid_sample(mode: str, padding: str, align_corners: bool) -> None:
    # Case 84 (pytorch/xla#4703, #2487): crops by grid_sample, places outside of the image too.
    image = torch.randn(2, 3, 9, 7).requires_grad_()
    grid = (torch.rand(2, 5, 4, 2) * 5 - 2.5).requires_grad_()
    check(F.grid_sample, image, grid, mode, padding, align_corners, **CLOSE)
    if mode != "bicubic":
        volume = torch.randn(2, 3, 4, 5, 6).requires_grad_()
        grid = (torch.rand(2, 3, 2, 4, 3) * 5 - 2.5).requires_grad_()
        check(F.grid_sample, volume, grid, mode, padding, align_corners, **CLOSE)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_of_corners_and_one_pixel(padding: str) -> None:
    grid = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    grid = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1)[None].requires_grad_()
    for size in ((4, 5), (1, 1)):
        for align_corners in (True, False):
            check(F.grid_sample, torch.randn(1, 2, *size), grid, "bilinear", padding, align_corners, **CLOSE)


def test_grid_sample_of_other_dtypes_and_nothing() -> None:
    image, grid = torch.randn(1, 2, 5, 5, dtype=torch.float64), torch.rand(1, 3, 3, 2, dtype=torch.float64) * 2 - 1
    check(F.grid_sample, image.requires_grad_(), grid.requires_grad_(), align_corners=False)
    check(F.grid_sample, torch.randn(0, 2, 5, 5), torch.zeros(0, 3, 3, 2), align_corners=False)


def test_nan_place() -> None:
    grid = torch.zeros(1, 1, 3, 2)
    grid[0, 0, 1, 0] = float("nan")
    for padding in ("zeros", "border"):
        check(F.grid_sample, torch.randn(1, 1, 4, 4), grid, "bilinear", padding, False)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_affine_grid(size: tuple[int, ...], align_corners: bool) -> None:
    n = len(size) - 2
    check(lambda t: F.affine_grid(t, list(size), align_corners), torch.randn(2, n, n + 1).requires_grad_(), **CLOSE)


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 1, "dilation": 2}, {"stride": (3, 2), "padding": (0, 2)}]
)
def test_blocks_and_back(options: dict[str, int]) -> None:
    x = torch.randn(2, 3, 9, 8).requires_grad_()
    check(lambda x: F.unfold(x, (3, 2), **options), x, **CLOSE)
    check(lambda x: F.fold(F.unfold(x, (3, 2), **options), (9, 8), (3, 2), **options), x, **CLOSE)
    check(lambda x: F.unfold(x[0], (3, 2), **options), x, **CLOSE)


def test_roi_align_in_plain_pytorch() -> None:
    # Case 84: the same crop written with gathers.
    def crop(image: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        y0, x0, y1, x1 = box.unbind(-1)
        k = (torch.arange(4, device=image.device) + 0.5) / 4
        ys = (y0[:, None] + (y1 - y0)[:, None] * k).clamp(0, image.shape[1] - 1)
        xs = (x0[:, None] + (x1 - x0)[:, None] * k).clamp(0, image.shape[2] - 1)
        a, b = ys.floor().long(), xs.floor().long()
        a1, b1 = (a + 1).clamp(max=image.shape[1] - 1), (b + 1).clamp(max=image.shape[2] - 1)
        fy, fx = (ys - a)[:, None, :, None], (xs - b)[:, None, None, :]

        def pixel(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return image[:, r[:, :, None], c[:, None, :]].transpose(0, 1)

        upper = pixel(a, b) * (1 - fx) + pixel(a, b1) * fx
        lower = pixel(a1, b) * (1 - fx) + pixel(a1, b1) * fx
        return upper * (1 - fy) + lower * fy

    box = torch.tensor([[0.0, 0.0, 8.0, 6.0], [1.3, 2.2, 5.9, 4.4], [-3.0, -1.0, 20.0, 9.0]])
    check(crop, torch.randn(2, 9, 7), box, **CLOSE)


def test_grid_sample_gradient_by_the_name_of_the_cpu_kernel() -> None:
    image, grid, grad = torch.randn(2, 3, 5, 6), torch.rand(2, 4, 4, 2) * 2 - 1, torch.randn(2, 3, 4, 4)
    backward = torch.ops.aten._grid_sampler_2d_cpu_fallback_backward
    check(lambda *args: backward(*args, 0, 0, True), grad, image, grid, **CLOSE)


def test_channel_shuffle() -> None:
    x = torch.arange(2 * 6 * 4 * 3.0).reshape(2, 6, 4, 3)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        check(lambda x: F.channel_shuffle(x, 3), x.contiguous(memory_format=memory_format).requires_grad_())
    check(lambda x: F.channel_shuffle(x, 2), torch.arange(16.0).reshape(2, 4, 2))
    with pytest.raises(RuntimeError, match="divisible by groups"):
        F.channel_shuffle(x.to("tpu"), 4)
