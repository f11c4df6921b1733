"""Embedding tables and bags of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def test_sample_inputs() -> None:
    check_opinfo("nn.functional.embedding", (f32, bf16, f64), samples=4)
    check_opinfo("nn.functional.embedding_bag", (f32,), samples=16)
    # The CPU rounds to bfloat16 after each row it adds.
    check_opinfo("nn.functional.embedding_bag", (bf16,), samples=3, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_look_up_and_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    def run(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
        return [F.embedding(indices, weight, **options), F.embedding(indices[0, 0], weight, **options)]

    check(run, torch.randn(5, 3, requires_grad=True), torch.tensor([[0, 1, 1], [4, 1, 0]], dtype=dtype))


def test_gradient_of_a_row_used_often() -> None:
    indices = torch.randint(0, 3, (50, 40), generator=torch.Generator().manual_seed(0))
    check(lambda w, i: F.embedding(i, w), torch.randn(4, 8, requires_grad=True), indices, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, 0.0, float("inf")])
def test_renormalisation(norm: float) -> None:
    def run(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
        rows = F.embedding(indices, weight, max_norm=0.7, norm_type=norm)
        return [rows, weight * 1]

    check(run, torch.randn(5, 3), torch.tensor([0, 1, 1, 4]))


MODES = ("sum", "mean", "max")
# One bag without elements in the middle, one at the end.
INDICES, OFFSETS = torch.tensor([0, 2, 1, 3, 1, 1]), torch.tensor([0, 3, 3, 5, 6])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wants_grad", [True, False])
def test_bags(mode: str, wants_grad: bool) -> None:
    def run(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.embedding_bag(indices, weight, offsets, mode=mode),
            F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=True),
            F.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=1),
            F.embedding_bag(indices.view(2, 3), weight, mode=mode),
        ]

    weight = -torch.rand(4, 2) - 1
    check(run, weight.requires_grad_(wants_grad), INDICES, OFFSETS)


def test_bags_scaled_by_frequency() -> None:
    """Against the look-up's gradient: the CPU kernel for bags takes the counts of other rows (PyTorch 2.13)."""
    weight = torch.randn(4, 2)
    on_device, on_host = weight.to("tpu").requires_grad_(), weight.clone().requires_grad_()
    seed = torch.randn(5, 2)
    bags = F.embedding_bag(INDICES.to("tpu"), on_device, OFFSETS.to("tpu"), mode="sum", scale_grad_by_freq=True)
    bags.backward(seed.to("tpu"))
    of_each = seed.repeat_interleave(torch.tensor([3, 0, 2, 1, 0]), 0)
    F.embedding(INDICES, on_host, scale_grad_by_freq=True).backward(of_each)
    assert on_device.grad is not None
    torch.testing.assert_close(on_device.grad.cpu(), on_host.grad)


def test_bags_with_a_weight_for_each_index() -> None:
    def run(
        weight: torch.Tensor, each: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> list[torch.Tensor]:
        return [
            F.embedding_bag(indices, weight, offsets, mode="sum", per_sample_weights=each),
            F.embedding_bag(indices, weight, offsets, mode="sum", per_sample_weights=each, padding_idx=1),
        ]

    check(run, torch.randn(4, 2, requires_grad=True), torch.randn(6, requires_grad=True), INDICES, OFFSETS)


def test_bags_without_any_index() -> None:
    def run(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        return [F.embedding_bag(indices, weight, offsets, mode=mode) for mode in MODES]

    check(run, torch.randn(4, 2, requires_grad=True), INDICES[:0], torch.zeros(3, dtype=torch.int64))


def test_modules_train_as_on_the_cpu() -> None:
    def run(weight: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
        table = torch.nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=2)
        bag = torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="mean")
        (table(indices).square().sum() + bag(indices).square().sum()).backward()
        return [table.weight.grad, bag.weight.grad]

    check(run, torch.randn(5, 3), torch.tensor([[0, 2, 2], [4, 1, 0]]))


def test_wrong_indices() -> None:
    weight = torch.randn(3, 2).to("tpu")
    five, zero = torch.tensor([5], device="tpu"), torch.tensor([0], device="tpu")
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(five, weight)
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(five - 6, weight)
    with pytest.raises(RuntimeError, match=r"takes value 5 which is not in the valid range \[0, 3\)"):
        F.embedding_bag(five, weight, zero)
    with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):
        F.embedding_bag(zero, weight, zero + 1)
    with pytest.raises(RuntimeError, match=r"offsets\[-1\] can not be greater than input's length 1"):
        F.embedding_bag(zero, weight, torch.tensor([0, 3], device="tpu"))
    with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
        F.embedding(five.float(), weight)
