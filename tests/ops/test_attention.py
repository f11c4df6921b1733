"""Attention against the CPU: the fused operation, its gradients and dropout, and nn.MultiheadAttention's fast paths."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools.compare import check, check_opinfo, no_fallback, to_device
from torch_tpu.ops import attention

fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
ROUNDED = {"rtol": 2e-2, "atol": 2e-2}


def _qkv(q_len: int = 5, k_len: int = 7, dtype: torch.dtype = torch.float32, width: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, q_len, 8), (2, 3, k_len, 8), (2, 3, k_len, width))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _reference(q, k, v, bias=None, is_causal=False, scale=None, kept=1.0):
    """The definition, where a query that may look nowhere gets zeros."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) * kept) @ v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("bias_shape", [None, (2, 3, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7)])
def test_fused_and_gradients(is_causal: bool, scale: float | None, bias_shape: tuple[int, ...] | None) -> None:
    leaves = _qkv()
    if bias_shape is not None:
        leaves.append(torch.randn(bias_shape, generator=torch.Generator().manual_seed(2)).requires_grad_())
    want = _reference(*leaves[:3], *leaves[3:] or [None], is_causal, scale)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    device = to_device(leaves)
    with no_fallback():
        got = fused(*device[:3], *device[3:] or [None], 0.0, is_causal, False, scale=scale)[0]
        got_grads = torch.autograd.grad(got, device, grad.to("tpu"))
    torch.testing.assert_close(got.cpu(), want, **CLOSE)
    for g, w in zip(got_grads, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(g.cpu(), w, **CLOSE)


def test_blocks_of_queries_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences run in blocks: 300 queries in blocks of 128, the last one padded."""
    monkeypatch.setattr(attention, "SCORES_AT_ONCE_ON_CPU", 1)
    for is_causal, bias in ((True, None), (False, torch.randn(1, 1, 300, 40)), (False, torch.randn(2, 3, 1, 40))):
        leaves = _qkv(300, 40)
        if bias is not None:
            leaves.append(bias.requires_grad_())
        want = _reference(*leaves[:3], *leaves[3:] or [None], is_causal)
        device = to_device(leaves)
        got, logsumexp = fused(*device[:3], *device[3:] or [None], 0.0, is_causal)[:2]
        torch.testing.assert_close(got.cpu(), want, **CLOSE)
        assert logsumexp.shape == (2, 3, 300)
        for g, w in zip(torch.autograd.grad(got.sum(), device), torch.autograd.grad(want.sum(), leaves), strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4)


def test_logsumexp() -> None:
    q, k, v = (t.detach() for t in _qkv())
    want = (q @ k.transpose(-1, -2) / math.sqrt(8)).logsumexp(-1)
    torch.testing.assert_close(fused(q.to("tpu"), k.to("tpu"), v.to("tpu"))[1].cpu(), want, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if dtype is torch.float64 else ROUNDED
    q, k, v = _qkv(dtype=dtype, width=8)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, strides=False, **tolerance)


@pytest.mark.parametrize("additive", [False, True])
def test_row_that_may_look_nowhere(additive: bool) -> None:
    q, k, v = _qkv(3, 3, width=8)
    mask = torch.tensor([[True, True, True], [False] * 3, [True, False, False]])
    if additive:
        mask = torch.zeros(3, 3).masked_fill(~mask, -math.inf)
    check(F.scaled_dot_product_attention, q, k, v, mask, strides=False, **CLOSE)


def test_strides_of_what_no_fused_cpu_kernel_takes() -> None:
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in _qkv(k_len=5, width=8))
    # Without a batch; values of another width; a mask with a gradient, or of three dimensions; strided elements.
    check(F.scaled_dot_product_attention, q[0], k[0], v[0], **CLOSE)
    check(F.scaled_dot_product_attention, q, k, v[..., :6], **CLOSE)
    check(F.scaled_dot_product_attention, q, k, v, torch.randn(5, 5, requires_grad=True), **CLOSE)
    check(F.scaled_dot_product_attention, q, k, v, torch.randn(3, 5, 5), **CLOSE)
    check(F.scaled_dot_product_attention, q, k.mT.contiguous().mT, v, **CLOSE)
    check(F.scaled_dot_product_attention, q, k, v, torch.randn(5, 5), **CLOSE)


def test_database() -> None:
    # Dropout's random mask is tested below.
    check_opinfo("nn.functional.scaled_dot_product_attention", samples=8, strides=False,
                 skip=lambda s: s.kwargs.get("dropout_p", 0) != 0, **CLOSE)  # fmt: skip


@pytest.mark.parametrize(
    ("is_causal", "mask_shape"), [(False, None), (True, None), (False, (5, 7)), (False, (2, 1, 5, 7))]
)
def test_the_name_of_the_cpu_kernel(is_causal: bool, mask_shape: tuple[int, ...] | None) -> None:
    leaves = _qkv(width=8)
    mask = None if mask_shape is None else torch.randn(mask_shape, generator=torch.Generator().manual_seed(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    check(lambda q, k, v, m: flash(q, k, v, 0.0, is_causal, attn_mask=m, scale=0.3), *leaves, mask, **CLOSE)


@pytest.mark.parametrize("mask", [torch.zeros(()), torch.zeros(7), torch.ones(7, dtype=torch.bool), torch.zeros(1)])
def test_masks_of_fewer_than_two_dimensions(mask: torch.Tensor) -> None:
    """The CPU's fused kernel refuses them, whether chosen in the end or not; its composite takes them."""
    q, k, v = (t.detach() for t in _qkv(width=8))
    for device in ("cpu", "tpu"):
        for width in (8, 6):
            with pytest.raises(IndexError):
                F.scaled_dot_product_attention(*(t.to(device) for t in (q, k, v[..., :width], mask)))
    check(F.scaled_dot_product_attention, q[0], k[0], v[0], mask, **CLOSE)
    if mask.is_floating_point():
        check(F.scaled_dot_product_attention, q, k, v, mask.clone().requires_grad_(), **CLOSE)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        check(F.scaled_dot_product_attention, q, k, v, mask, **CLOSE)


def test_arguments_that_the_cpu_refuses() -> None:
    for device in ("cpu", "tpu"):
        q, k, v = (t.detach().to(device) for t in _qkv(width=8))
        with pytest.raises(RuntimeError, match=r"between 0 and 1, but got 1\.5"):
            F.scaled_dot_product_attention(q, k, v, dropout_p=1.5)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, dropout_p=-1.0)
        with pytest.raises(RuntimeError) as refused:
            F.scaled_dot_product_attention(q.long(), k.long(), v.long())
        assert not isinstance(refused.value, NotImplementedError)


def test_which_kernel_is_chosen() -> None:
    q, k, v = (t.detach().to("tpu") for t in _qkv())
    assert torch._fused_sdp_choice(q, k, v) == torch.nn.attention.SDPBackend.OVERRIDEABLE.value
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch._fused_sdp_choice(q, k, v) == torch.nn.attention.SDPBackend.MATH.value


def test_heads_of_a_joint_projection() -> None:
    x, bias = torch.randn(2, 5, 24), torch.randn(24)
    check(lambda x, b: torch._transform_bias_rescale_qkv(x, b, 4), x, bias)


def test_dropout_is_the_same_in_the_gradient() -> None:
    """With values that pick out the weights, the output shows the mask, and the gradient must agree with it."""
    q, k, _ = _qkv(6, 8)
    v = torch.eye(8).expand(2, 3, 8, 8).contiguous().requires_grad_()
    device = to_device([q, k, v])
    torch.manual_seed(5)
    got = fused(*device, None, 0.5)[0]
    weights = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    kept = (got.detach().cpu() / weights.detach()).round()
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < (kept == 0).float().mean() < 0.7
    want = _reference(q, k, v, kept=kept)
    torch.testing.assert_close(got.cpu(), want, **CLOSE)
    grad = torch.randn(want.shape)
    for g, w in zip(
        torch.autograd.grad(got, device, grad.to("tpu")), torch.autograd.grad(want, [q, k, v], grad), strict=True
    ):
        torch.testing.assert_close(g.cpu(), w, **CLOSE)


def test_dropout_follows_the_seed_and_varies() -> None:
    q, k, v = (t.detach() for t in to_device(_qkv()))

    def draw() -> torch.Tensor:
        return fused(q, k, v, None, 0.5)[0].cpu()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(first, draw())
    assert not torch.equal(first, second)
    assert torch.equal(fused(q, k, v, None, 1.0)[0].cpu(), torch.zeros(2, 3, 5, 6))


def _masks() -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    return padding, torch.ones(5, 5, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("additive", [False, True])
def test_multihead_attention_with_both_masks(training: bool, additive: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x, (padding, causal) = torch.randn(2, 5, 8), _masks()
    if additive:
        padding, causal = (torch.zeros(m.shape).masked_fill(m, -math.inf) for m in (padding, causal))
    for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": causal},
                  {"key_padding_mask": padding, "attn_mask": causal}):  # fmt: skip
        with torch.set_grad_enabled(training):
            want, want_weights = module.to("cpu")(x, x, x, **masks)
            on_device, y = module.to("tpu"), x.to("tpu")
            with no_fallback():
                got, weights = on_device(y, y, y, **{k: m.to("tpu") for k, m in masks.items()})
        torch.testing.assert_close(got.cpu(), want, **CLOSE)
        torch.testing.assert_close(weights.cpu(), want_weights, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_encoder_layer_fast_path(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()
    x, (padding, causal) = torch.randn(2, 5, 8), _masks()
    for masks in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "src_key_padding_mask": padding}):
        with torch.no_grad():
            want = module.to("cpu")(x, **masks)
            device_masks = {k: m.to("tpu") for k, m in masks.items()}
            with no_fallback():
                got = module.to("tpu")(x.to("tpu"), **device_masks)
        slow = module(x.to("tpu"), **device_masks).detach()
        torch.testing.assert_close(got.cpu(), want, **CLOSE)
        torch.testing.assert_close(got.cpu()[1, :3], slow.cpu()[1, :3], **CLOSE)


def test_encoder_layer_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    parameters = {k: v.detach().requires_grad_() for k, v in module.named_parameters()}
    x = torch.randn(2, 5, 8)
    check(lambda p, x: torch.func.functional_call(module, p, (x,)), parameters, x, rtol=1e-3, atol=1e-4)
