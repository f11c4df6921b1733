"""`torch.autocast("tpu")` and `torch.amp.GradScaler("tpu")`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture
def x():
    return torch.randn(4, 4).to("tpu")


def test_the_default_dtype():
    assert torch.get_autocast_dtype("tpu") is torch.bfloat16
    assert torch.amp.is_autocast_available("tpu")
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_lower_precision(x, dtype):
    expected = dtype or torch.bfloat16
    with torch.autocast("tpu", dtype=dtype):
        assert (x @ x).dtype is expected
        assert F.linear(x, x).dtype is expected
        assert torch.addmm(x, x, x).dtype is expected
        assert torch.einsum("ij,jk->ik", x, x).dtype is expected
        assert F.conv1d(x[None], torch.ones(2, 4, 3, device="tpu")).dtype is expected
        assert F.scaled_dot_product_attention(*[x[None, None]] * 3).dtype is expected
        assert (x.double() @ x.double()).dtype is torch.float64
    assert (x @ x).dtype is torch.float32


def test_values_equal_those_of_explicit_casts(x):
    with torch.autocast("tpu"):
        actual = F.linear(x, x)
    expected = F.linear(x.bfloat16(), x.bfloat16())
    assert torch.equal(actual.cpu(), expected.cpu())


def test_float32(x):
    half = x.bfloat16()
    with torch.autocast("tpu"):
        assert half.exp().dtype is torch.float32
        assert half.softmax(-1).dtype is torch.float32
        assert half.log_softmax(-1).dtype is torch.float32
        assert half.sum().dtype is torch.float32
        assert half.sum(0).dtype is torch.float32
        assert half.cumsum(0).dtype is torch.float32
        assert half.norm().dtype is torch.float32
        assert half.norm(dim=0).dtype is torch.float32
        assert half.norm(2, dim=0, keepdim=True).shape == (1, 4)
        assert torch.linalg.vector_norm(half).dtype is torch.float32
        assert F.layer_norm(half, (4,)).dtype is torch.float32
        assert F.mse_loss(half, half).dtype is torch.float32
        assert half.pow(2).dtype is torch.float32
        assert half.sum(dtype=torch.float64).dtype is torch.float64
        assert half.softmax(-1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert torch.ones(3, device="tpu", dtype=torch.int32).sum().dtype is torch.int64


def test_the_dtype_of_the_inputs(x):
    half = x.bfloat16()
    with torch.autocast("tpu"):
        assert (half + half).dtype is torch.bfloat16
        assert (half + x).dtype is torch.float32
        assert half.relu().dtype is torch.bfloat16


def test_widest(x):
    half = x.bfloat16()
    index = torch.zeros(4, 4, dtype=torch.int64, device="tpu")
    with torch.autocast("tpu"):
        assert torch.addcmul(half, half, x).dtype is torch.float32
        assert torch.addcmul(half, half, half).dtype is torch.bfloat16
        assert torch.atan2(half, x).dtype is torch.float32
        assert x.scatter_add(0, index, half).dtype is torch.float32
        assert torch.cat([half, x]).dtype is torch.float32


def test_binary_cross_entropy_is_refused(x):
    with torch.autocast("tpu"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_nested_and_disabled(x):
    with torch.autocast("tpu"):
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16
    with torch.autocast("tpu", enabled=False):
        assert (x @ x).dtype is torch.float32


def test_the_cpu_is_not_affected(x):
    on_cpu = x.cpu()
    with torch.autocast("tpu"):
        assert (on_cpu @ on_cpu).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (on_cpu @ on_cpu).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float32


def test_training(x):
    reference, module = nn.Linear(4, 4), nn.Linear(4, 4)
    module.load_state_dict(reference.state_dict())
    module.to("tpu")
    with torch.autocast("tpu"):
        loss = F.mse_loss(module(x), torch.zeros_like(x))
    assert loss.dtype is torch.float32
    loss.backward()
    F.mse_loss(reference(x.cpu()), torch.zeros(4, 4)).backward()
    assert module.weight.grad.dtype is torch.float32
    torch.testing.assert_close(module.weight.grad.cpu(), reference.weight.grad, rtol=3e-2, atol=1e-2)


def test_checkpoint_keeps_the_region(x):
    seen = []

    def block(t):
        seen.append((torch.is_autocast_enabled("tpu"), torch.get_autocast_dtype("tpu")))
        return (t @ t).float().sum()

    x.requires_grad_()
    with torch.autocast("tpu"):
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).backward()
    assert seen == [(True, torch.bfloat16)] * 2


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_mixed_inputs(layer):
    module = layer(4, 4).to("tpu")
    with torch.autocast("tpu"):
        output, _ = module(torch.randn(3, 2, 4).to("tpu", torch.bfloat16))
    assert output.dtype is torch.bfloat16


def test_the_key_alone_changes_nothing(run_python):
    script = """
import torch, torch_tpu
torch.set_autocast_enabled("tpu", True)
print((torch.ones(2, 2, device="tpu") @ torch.ones(2, 2, device="tpu")).tolist())
"""
    assert run_python(script).strip() == "[[2.0, 2.0], [2.0, 2.0]]"


def test_grad_scaler():
    scaler = torch.amp.GradScaler("tpu", init_scale=1024.0)
    parameter = nn.Parameter(torch.ones(2, device="tpu"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad.tolist() == [1024, 1024]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0, 0]
    assert scaler.get_scale() == 1024
    optimizer.zero_grad()
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0, 0]
    assert scaler.get_scale() == 512


def test_control_flow_under_autocast(x):
    from torch._higher_order_ops.cond import cond

    with torch.autocast("tpu"):
        taken = cond(torch.tensor(True, device="tpu"), lambda t: t.sin(), lambda t: t.cos(), (x,))
    torch.testing.assert_close(taken.cpu(), x.cpu().sin())
