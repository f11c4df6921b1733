"""`scaled_dot_product_attention`: same results as on the CPU, and which operation computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def fused(self):
        return "_scaled_dot_product_fused_attention_overrideable" in self.names


def compare(shapes, fused, mask=None, **options):
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    on_device = [tensor.detach().to("tpu").requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    with Operations() as operations:
        actual = F.scaled_dot_product_attention(
            *on_device, attn_mask=None if mask is None else mask.to("tpu"), **options
        )
    assert operations.fused == fused
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    actual.backward(gradient.to("tpu"))
    for theirs, ours in zip((q, k, v), on_device, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)


SAME = [(2, 3, 5, 8)] * 3


def test_plain_and_scaled():
    compare(SAME, fused=True)
    compare(SAME, fused=True, scale=0.3)


def test_causal():
    compare(SAME, fused=True, is_causal=True)
    compare([(2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)], fused=True, is_causal=True)


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5), (1, 3, 1, 5), (2, 3, 5, 5), (1, 5)])
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(shape, boolean):
    mask = torch.rand(shape) > 0.3 if boolean else torch.randn(shape)
    if boolean:
        mask[..., 0] = True
    compare(SAME, fused=True, mask=mask)


def test_a_row_that_looks_nowhere_is_zero():
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    compare(SAME, fused=True, mask=mask)


def test_gradient_of_a_broadcast_mask():
    q, k, v = (torch.randn(SAME[0]) for _ in range(3))
    mask = torch.randn(5, 5, requires_grad=True)
    on_device = mask.detach().to("tpu").requires_grad_()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    F.scaled_dot_product_attention(*(t.to("tpu") for t in (q, k, v)), attn_mask=on_device).sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), mask.grad, rtol=1e-4, atol=1e-5)


def test_lengths_and_widths_that_differ():
    compare([(2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)], fused=True)
    compare([(2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 16)], fused=True)


def test_three_dimensions():
    compare([(3, 5, 8)] * 3, fused=True)
    compare([(3, 5, 8)] * 3, fused=True, mask=torch.randn(3, 5, 5))


def test_shapes_that_only_the_composite_takes():
    compare([(5, 8)] * 3, fused=False)
    compare([(2, 2, 3, 5, 8)] * 3, fused=False)
    compare([(2, 3, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)], fused=False)


@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_the_composite(boolean):
    mask = torch.rand(2, 1, 5, 5) > 0.5 if boolean else torch.randn(2, 1, 5, 5)
    if boolean:
        mask[..., 0] = True
    compare([(2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)], fused=False, mask=mask)


def test_grouped_queries():
    compare([(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)], fused=True, enable_gqa=True)
    compare([(2, 4, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)], fused=True, enable_gqa=True, is_causal=True)


def test_dropout():
    q, k = (torch.randn(2, 3, 5, 8).to("tpu") for _ in range(2))
    v = torch.eye(5).expand(2, 3, 5, 5).contiguous().to("tpu").requires_grad_()
    weights = F.scaled_dot_product_attention(q, k, v.detach()).cpu()
    with Operations() as operations:
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert operations.fused
    kept = dropped.detach().cpu()
    assert 0.2 < (kept == 0).float().mean() < 0.8
    torch.testing.assert_close(kept, torch.where(kept == 0, 0.0, 2 * weights))
    gradient = torch.randn(2, 3, 5, 5)
    dropped.backward(gradient.to("tpu"))
    torch.testing.assert_close(v.grad.cpu(), kept.mT @ gradient, rtol=1e-4, atol=1e-5)


def test_sdpa_kernel_chooses():
    x = torch.randn(SAME[0]).to("tpu")
    for backend, fused in (
        (SDPBackend.MATH, False),
        (SDPBackend.OVERRIDEABLE, True),
        (SDPBackend.FLASH_ATTENTION, True),
        (SDPBackend.EFFICIENT_ATTENTION, True),
    ):
        with sdpa_kernel(backend), Operations() as operations:
            F.scaled_dot_product_attention(x, x, x)
        assert operations.fused == fused
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0])


def test_function_transforms():
    def loss(x):
        return F.scaled_dot_product_attention(x, x, x).pow(2).sum()

    x = torch.randn(4, *SAME[0])
    for function, argument in (
        (torch.func.grad(loss), x[0]),
        (torch.func.vmap(loss), x),
        (torch.func.vmap(torch.func.grad(loss)), x),
    ):
        torch.testing.assert_close(function(argument.to("tpu")).cpu(), function(argument), rtol=1e-4, atol=1e-5)


def test_inference_mode():
    x = torch.randn(SAME[0])
    with torch.inference_mode():
        actual = F.scaled_dot_product_attention(*[x.to("tpu")] * 3)
    torch.testing.assert_close(actual.cpu(), F.scaled_dot_product_attention(x, x, x), rtol=1e-4, atol=1e-5)


def test_mistakes_are_named():
    x = torch.randn(SAME[0]).to("tpu")
    for arguments, message in (
        ({"key": x.half()}, "same dtype"),
        ({"key": torch.randn(SAME[0])}, "same device type"),
        ({"attn_mask": torch.ones(5, 5, device="tpu"), "is_causal": True}, "should not be set when is_causal"),
        ({"attn_mask": torch.ones(5, 5, device="tpu", dtype=torch.int32)}, "attn_mask dtype"),
        ({"key": torch.ones(8, device="tpu")}, "at least 2 dimensional"),
    ):
        with pytest.raises(RuntimeError, match=message):
            F.scaled_dot_product_attention(**({"query": x, "key": x, "value": x} | arguments))
