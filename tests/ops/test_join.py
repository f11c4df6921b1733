"""Joining, splitting, repeating and turning tensors; copies of views."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check, check_opinfo

f32, bf16, i64, b8, c64 = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize("name", ["cat", "stack", "repeat", "roll", "flip", "rot90", "unfold", "repeat_interleave"])
def test_sample_inputs(name: str) -> None:
    check_opinfo(name, (f32,), samples=10)
    check_opinfo(name, (bf16, i64, b8, c64), samples=2)


@pytest.mark.parametrize(
    "name",
    [
        "tile",
        "fliplr",
        "split",
        "split_with_sizes",
        "split_with_sizes_copy",
        "unbind",
        "unbind_copy",
        "chunk",
        "hstack",
        "dstack",
        "column_stack",
        "block_diag",
        "_chunk_cat",
        "cartesian_prod",
        "combinations",
        "unsafe_split",
        "unsafe_chunk",
        "nn.functional.pixel_shuffle",
        "nn.functional.pixel_unshuffle",
        "nn.functional.channel_shuffle",
        "view_copy",
        "expand_copy",
        "permute_copy",
        "t_copy",
        "transpose_copy",
        "unsqueeze_copy",
        "squeeze_copy",
        "unfold_copy",
        "diagonal_copy",
        "as_strided_copy",
        "alias_copy",
        "narrow_copy",
    ],
)
def test_sample_inputs_of_rearrangements(name: str) -> None:
    check_opinfo(name, (f32,), samples=3)


@pytest.mark.parametrize(
    ("first", "second"), [(i64, f32), (torch.int32, i64), (torch.half, bf16), (b8, torch.uint8), (f32, torch.float64)]
)
def test_join_promotes(first: torch.dtype, second: torch.dtype) -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x, y], 1), torch.hstack([x, y]), torch.stack([x, y]), torch.cat([y, x, y], -2)]

    check(run, torch.tensor([[1, 0]]).to(first), torch.tensor([[3, 5]]).to(second))


def test_cat_of_a_tensor_without_elements() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        empty = torch.empty(0, device=x.device)
        return [
            torch.cat([empty, x], 0),
            torch.cat([x, empty], 2),
            torch.cat([x[:, 1:1], x], 1),
            torch.cat([empty, empty]),
            torch.cat([x[:0], x[:0]]),
        ]

    check(run, torch.randn(2, 3, 4))


def test_results_keep_channels_last() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x, x], 1), torch.flip(x, [2]), torch.roll(x, 1, 3), torch.nn.functional.pixel_shuffle(x, 2)]

    check(run, torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last))


def test_join_out_and_views() -> None:
    def run(x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        torch.cat([x.t(), x[:, :2].t()], out=out)
        return [out * 1, torch.cat([x[:, ::2], x[:, 1::2]], 1), torch.stack(x.unbind(1), -1)]

    check(run, torch.randn(3, 4), torch.empty(6, 3))


def test_in_place_change_of_shape() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.transpose_(0, 1).unsqueeze_(1).squeeze_(1).swapdims_(0, 1).t_()
        y[0] = 5
        return y

    check(run, torch.randn(3, 4))


def test_repeats_of_each_element() -> None:
    def run(x: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.repeat_interleave(2),
            x.repeat_interleave(3, dim=1),
            x.repeat_interleave(counts, dim=0),
            x.repeat_interleave(counts, dim=0, output_size=4),
            x.repeat(2, 1, 3),
            x.repeat(0, 1),
            x.repeat(1, 1),
        ]

    check(run, torch.randn(3, 4, requires_grad=True), torch.tensor([2, 0, 2]))


def test_windows_that_overlap() -> None:
    check(lambda x: x.unfold(1, 4, 2).unfold(0, 2, 1), torch.randn(3, 10, requires_grad=True))


def test_gradient_through_split_and_unbind() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        parts = torch.split((x**4).view(-1), [1, 2])
        (g,) = torch.autograd.grad(parts, x, [torch.ones_like(p) for p in parts], create_graph=True)
        a, _, c = g.unbind(1)
        return a * c

    check(run, torch.tensor([[2.0, -1.0, 0.5]], requires_grad=True))


def test_numbers_of_different_shapes_do_not_join() -> None:
    x = torch.ones(3, 4, device="tpu")
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 0"):
        torch.cat([x, x[:, :3]])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([x, x[:2]])
