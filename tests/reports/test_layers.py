"""Reports about layers: pooling, convolution, embedding bags, CTC, attention masks, crops, singular values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((8, 10), 3, 4, 0), ((5, 6), 1, 2, 0), ((7, 7), 3, 2, 1), ((6, 9), 2, 3, 1)],
)
def test_ceil_mode(size: tuple[int, int], kernel: int, stride: int, padding: int) -> None:
    """A window that starts outside the image: pytorch/xla#2583, pytorch/xla#2578."""
    x = torch.randn(1, 2, *size, requires_grad=True)
    check(lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=True, return_indices=True), x)


def test_pooling_of_negative_numbers_and_ties() -> None:
    """Padding that wins, ties that share the gradient: pytorch/xla#2583."""
    check(lambda x: F.max_pool2d(x, 3, 2, 1), torch.full((1, 1, 2, 2), -5.0))
    check(lambda x: F.max_pool2d(x, 2, 1), torch.ones(1, 1, 4, 4, requires_grad=True))
    check(lambda x: F.adaptive_max_pool2d(x, (2, 3)), torch.randn(1, 1, 5, 7))


@pytest.mark.parametrize(
    ("stride", "padding", "extra", "groups", "dilation"),
    [(2, 1, 1, 1, 1), (3, 0, 2, 2, 1), ((3, 2), (1, 2), (2, 1), 2, (4, 3)), (1, 0, 0, 4, 2), (2, 0, 1, 1, 2)],
)
def test_transposed_convolution(stride: Any, padding: Any, extra: Any, groups: int, dilation: Any) -> None:
    """Options that change the size together: pytorch/xla#2351, pytorch/pytorch#63314."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, b, stride, padding, extra, groups, dilation)

    x, w, b = torch.randn(2, 4, 4, 5), torch.randn(4, 3, 3, 2), torch.randn(3 * groups)
    # sums of up to 80 products in another order
    check(run, *(t.requires_grad_() for t in (x, w, b)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["max", "sum", "mean"])
@pytest.mark.parametrize("wants_grad", [True, False])
def test_embedding_bags(mode: str, wants_grad: bool) -> None:
    """A zero mixed into the maximum: pytorch/xla#7588."""
    weight = torch.tensor([[-1.0, 2.0], [-3.0, -4.0], [-5.0, 6.0], [7.0, -8.0]], requires_grad=wants_grad)
    indices = torch.tensor([0, 1, 2, 3, 1, 1])
    for offsets in ([0, 3, 5], [0, 0, 6]):
        check(lambda i, w, o: F.embedding_bag(i, w, o, mode=mode), indices, weight, torch.tensor(offsets))


@pytest.mark.parametrize(
    ("inputs", "targets", "options"),
    [
        ([20, 20, 20], [7, 5, 3], {}),
        ([20, 12, 4], [7, 0, 7], {"zero_infinity": True}),
        ([20, 15, 10], [2, 3, 4], {"reduction": "sum"}),
    ],
)
def test_ctc_lengths_on_the_host(inputs: list[int], targets: list[int], options: dict[str, Any]) -> None:
    """Lengths as host tensors and tuples: pytorch/xla#929, pytorch/xla#2844."""
    labels = torch.randint(1, 6, (3, 7))

    def run(x: torch.Tensor, labels: torch.Tensor) -> Any:
        p = x.log_softmax(2)
        padded = F.ctc_loss(p, labels, torch.tensor(inputs), torch.tensor(targets), **options)
        return padded, F.ctc_loss(p, labels.flatten()[:9], (20, 20, 20), (3, 3, 3))

    check(
        run, torch.randn(20, 3, 6, requires_grad=True), labels, rtol=1e-4, atol=1e-5
    )  # 20 logarithms of sums in a row


@pytest.mark.parametrize("additive", [True, False])
def test_attention_with_both_masks(additive: bool) -> None:
    """One of two masks ignored: pytorch/pytorch#109517, pytorch/pytorch#103749."""
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if additive:
        padding, causal = (torch.zeros(m.shape).masked_fill(m, float("-inf")) for m in (padding, causal))

    def run(x: torch.Tensor, padding: torch.Tensor, causal: torch.Tensor) -> Any:
        return layer.to(x.device)(x, x, x, key_padding_mask=padding, attn_mask=causal)

    check(run, torch.randn(2, 5, 8), padding, causal, strides=False)


def test_encoder_layer_with_and_without_gradients() -> None:
    """A fast path with other results: pytorch/pytorch#103749."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to("tpu").eval()
    x = torch.randn(2, 5, 8).to("tpu")
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).to("tpu")
    with torch.no_grad():
        fast = layer(x, src_key_padding_mask=padding)
    slow = layer(x, src_key_padding_mask=padding).detach()
    torch.testing.assert_close(fast[0].cpu(), slow[0].cpu())
    torch.testing.assert_close(fast[1, :3].cpu(), slow[1, :3].cpu())


def test_crops_by_indexing() -> None:
    """Bilinear crops in plain PyTorch: pytorch/xla#4703."""

    def crop(image: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        centres = (torch.arange(4, device=image.device) + 0.5) / 4
        rows = (box[:, 0, None] + (box[:, 2] - box[:, 0])[:, None] * centres).clamp(0, image.shape[1] - 1)
        columns = (box[:, 1, None] + (box[:, 3] - box[:, 1])[:, None] * centres).clamp(0, image.shape[2] - 1)
        top, left = rows.floor().long(), columns.floor().long()
        bottom, right = (top + 1).clamp(max=image.shape[1] - 1), (left + 1).clamp(max=image.shape[2] - 1)
        down, across = (rows - top)[:, None, :, None], (columns - left)[:, None, None, :]

        def at(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return image[:, r[:, :, None], c[:, None, :]].transpose(0, 1)

        upper = at(top, left) * (1 - across) + at(top, right) * across
        lower = at(bottom, left) * (1 - across) + at(bottom, right) * across
        return upper * (1 - down) + lower * down

    boxes = torch.tensor([[0.0, 0.0, 8.0, 6.0], [1.3, 2.2, 5.9, 4.4], [-3.0, -1.0, 20.0, 9.0]])
    check(crop, torch.randn(2, 9, 7, requires_grad=True), boxes)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_crops_by_a_grid(mode: str) -> None:
    """Places beside the image: pytorch/xla#2487."""
    image, grid = torch.randn(1, 2, 9, 7, requires_grad=True), torch.rand(1, 5, 4, 2) * 2.6 - 1.3
    for padding in ("zeros", "border", "reflection"):
        for corners in (True, False):
            check(F.grid_sample, image, grid, mode, padding, corners, rtol=1e-4, atol=1e-5)  # cubic weights cancel


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_singular_vectors(shape: tuple[int, ...], full: bool) -> None:
    """Factors of the wrong size, or one for the other's transpose: pytorch/xla#4511, pytorch/xla#4537."""
    a = torch.randn(shape)
    u, s, vh = torch.linalg.svd(a.to("tpu"), full_matrices=full)
    for got, want in zip((u, s, vh), torch.linalg.svd(a, full_matrices=full), strict=True):
        assert got.shape == want.shape
    k = s.shape[-1]
    torch.testing.assert_close((u[..., :k] @ torch.diag_embed(s) @ vh[..., :k, :]).cpu(), a, rtol=1e-4, atol=1e-5)
    check(torch.linalg.svdvals, a)
    assert torch.linalg.matrix_rank(torch.ones(3, 3, device="tpu")).item() == 1
    left, _, right = torch.svd(torch.randn(4, 2).to("tpu"))
    assert (left.shape, right.shape) == ((4, 2), (2, 2))
