"""Losses and their derivatives against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo
from torch_tpu import metrics

LOSSES = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "cross_entropy",
    "hinge_embedding_loss",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "cosine_embedding_loss",
    "triplet_margin_loss",
]


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    check_opinfo(f"nn.functional.{name}", (torch.float32,), samples=9)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "cross_entropy"])
def test_loss_in_half_and_double_precision(name: str) -> None:
    # A sum of rounded bfloat16 losses may differ by a rounding more.
    check_opinfo(f"nn.functional.{name}", (torch.bfloat16,), samples=4, rtol=2e-2, atol=2e-2)
    check_opinfo(f"nn.functional.{name}", (torch.float64,), samples=3)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nll_loss_of_images_with_weights_and_ignored_pixels(reduction: str) -> None:
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    target = torch.randint(0, 5, (2, 3, 4))
    target[0, 0] = 255
    check(F.cross_entropy, x, target, torch.rand(5), ignore_index=255, reduction=reduction)


def test_cross_entropy_of_probabilities_and_smoothing() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    check(F.cross_entropy, x, torch.randn(4, 6).softmax(1), label_smoothing=0.1)
    check(F.cross_entropy, x, torch.tensor([0, 5, -100, 2]), label_smoothing=0.1)
    check(F.cross_entropy, x, torch.tensor([-100] * 4))
    check(F.cross_entropy, x[:0].detach(), torch.empty(0, dtype=torch.long), reduction="sum")


@pytest.mark.parametrize("target", [[0, 6], [-1, 0]])
def test_class_out_of_bounds(target: list[int]) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        F.nll_loss(torch.ones(2, 6, device="tpu"), torch.tensor(target, device="tpu")).item()


def test_probability_out_of_range() -> None:
    half = torch.full((2,), 0.5, device="tpu")
    with pytest.raises(RuntimeError, match="all elements of input should be between 0 and 1"):
        F.binary_cross_entropy(torch.tensor([0.5, 1.5], device="tpu"), half).item()
    with pytest.raises(RuntimeError, match="all elements of target should be between 0 and 1"):
        F.binary_cross_entropy(half, torch.tensor([0.5, -1.5], device="tpu")).item()


def test_cross_entropy_at_certain_predictions() -> None:
    inf = float("inf")
    check(F.binary_cross_entropy, torch.tensor([0.0, 1.0, 0.0, 1.0], requires_grad=True), torch.tensor([0.0, 1, 1, 0]))
    check(
        F.binary_cross_entropy_with_logits,
        torch.tensor([100.0, -100.0, 0.0, 1e4, inf], requires_grad=True),
        torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0]),
        reduction="none",
    )


def test_changing_delta_does_not_recompile() -> None:
    x, y = torch.tensor([3.0], device="tpu"), torch.zeros(1, device="tpu")
    F.huber_loss(x, y, delta=0.5)
    before = metrics.counters().get("program", 0)
    assert [F.huber_loss(x, y, delta=d).item() for d in (2.0, 0.25)] == [4.0, 0.71875]
    assert metrics.counters().get("program", 0) == before


# --- connectionist temporal classification -----------------------------------------------------------------------


def ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: list[int], lengths: list[int], **options: object
) -> object:
    return F.ctc_loss(log_probs.log_softmax(-1), targets, torch.tensor(inputs), torch.tensor(lengths), **options)


@pytest.mark.parametrize(
    ("inputs", "lengths", "options"),
    [
        ([20, 20, 20], [7, 5, 3], {}),
        ([20, 12, 4], [7, 0, 7], {"zero_infinity": True}),
        ([20, 15, 10], [2, 3, 4], {"reduction": "sum"}),
        ([20, 15, 10], [2, 3, 4], {"reduction": "none", "blank": 5}),
        ([1, 2, 20], [0, 1, 7], {"reduction": "none"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ctc(inputs: list[int], lengths: list[int], options: dict[str, object], dtype: torch.dtype) -> None:
    targets = torch.randint(1, 5, (3, 7), generator=torch.Generator().manual_seed(0))
    scores = torch.randn(20, 3, 6, generator=torch.Generator().manual_seed(1), dtype=dtype, requires_grad=True)
    # A loss sums some twenty logarithms of float32.
    check(ctc, scores, targets, inputs, lengths, rtol=1e-5, atol=1e-5, **options)
    flat = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    check(ctc, scores, flat, inputs, lengths, rtol=1e-5, atol=1e-5, **options)


def test_ctc_of_one_sequence_and_repeated_labels() -> None:
    scores = torch.randn(9, 4, requires_grad=True)
    check(ctc, scores, torch.tensor([1, 1, 2, 2]), 9, 4, rtol=1e-5, atol=1e-5)


def test_impossible_ctc_is_infinite() -> None:
    scores = torch.randn(3, 1, 4)
    check(ctc, scores, torch.tensor([[1, 1, 2]]), [3], [3], reduction="none")


def test_ctc_lengths_are_data() -> None:
    scores = torch.randn(10, 2, 4).to("tpu").log_softmax(2)
    targets = torch.randint(1, 4, (2, 3)).to("tpu")
    F.ctc_loss(scores, targets, (10, 9), (3, 2))
    before = metrics.counters().get("program", 0)
    F.ctc_loss(scores, targets, (8, 7), (1, 3))
    assert metrics.counters().get("program", 0) == before
    with pytest.raises(RuntimeError, match="input_lengths"):
        F.ctc_loss(scores, targets, (11, 9), (3, 2))


def test_one_sample_of_many_labels_has_one_loss() -> None:
    x, target = torch.randn(10, requires_grad=True), torch.tensor([1, 3, -1, *range(7)])
    for reduction in ("none", "mean", "sum"):
        check(lambda x, t, r=reduction: torch.nn.functional.multilabel_margin_loss(x, t, reduction=r), x, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_in_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    """As on the CPU, whose defaults PyTorch keeps in a table by device."""
    x, weight = torch.randn(64, 32).to(dtype), torch.randn(100, 32).to(dtype)
    target = torch.randint(100, (64,))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, weight, target, reduction="none", options=options)

    want = F.cross_entropy(x.float() @ weight.float().T, target, reduction="none")
    got = loss(*(t.to("tpu") for t in (x, weight, target))).cpu().float()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=eps, atol=eps / 16)


def test_linear_cross_entropy_is_a_part_of_a_compiled_program() -> None:
    x, weight, target = torch.randn(8, 6, requires_grad=True), torch.randn(10, 6), torch.randint(10, (8,))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4, allow_retain_graph=True)

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy((x * 2).tanh(), weight, target, options=options) * 3

    compiled = torch.compile(loss, fullgraph=True)
    # The CPU runs the function itself: what is compared is the device, and Inductor would compile for a minute.
    check(lambda x, *rest: (compiled if x.device.type == "tpu" else loss)(x, *rest), x, weight, target)
    assert not {"graph_by_operator", "graph_cut"} & metrics.counters().keys()
