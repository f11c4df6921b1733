"""Functions of which autograd has gradients for some results only, or for none: no gradient is no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

aten = torch.ops.aten


class Stop(torch.autograd.Function):
    """Has no gradient for its input: what computed that is called without one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def square(x: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix with separate eigenvalues."""
    return x[:3, :3] + x[:3, :3].mT + torch.diag(torch.tensor([1.0, 5.0, 12.0], device=x.device))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, 1, *x.shape)


def ones(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, device=x.device)


def recurrent(kind: Any, x: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(x.shape[1], 2, **options).to(x.device)
    result = layer(x.unsqueeze(0))
    return result[0], *(result[1] if isinstance(result[1], tuple) else (result[1],))


def attention_of_modules(x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    return nn.MultiheadAttention(x.shape[1], 1).to(x.device)(x, x, x)


def overrideable(x: torch.Tensor) -> torch.Tensor:
    """The operator attention becomes on the device, with a bias that needs a gradient."""
    bias = x.sum(-1).expand(1, 1, x.shape[0], x.shape[0])
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=bias)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
    "causal attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "attention with a bias": overrideable,
    "nn.MultiheadAttention": attention_of_modules,
    "layer norm": lambda x: aten.native_layer_norm(x, [4], ones(x, 4), ones(x, 4), 1e-5),
    "F.layer_norm": lambda x: F.layer_norm(x, [4], ones(x, 4) * x[0], x[1]),
    "group norm": lambda x: aten.native_group_norm(x[:, :, None], x[0], x[1], 4, 4, 1, 2, 1e-5),
    "F.group_norm": lambda x: F.group_norm(x, 2, x[0], x[1]),
    "batch norm": lambda x: F.batch_norm(x, None, None, x[0], x[1], training=True),
    "native batch norm": lambda x: aten.native_batch_norm(x, x[0], x[1], None, None, True, 0.1, 1e-5),
    "instance norm": lambda x: F.instance_norm(x[None], weight=ones(x, 4) * x[:, 0], bias=x[:, 1]),
    "rms norm": lambda x: F.rms_norm(x, [4], x[0]),
    "weight norm": lambda x: aten._weight_norm_interface(x, x[:, :1].abs() + 1),
    "LSTM": lambda x: recurrent(nn.LSTM, x, num_layers=2, bidirectional=True),
    "GRU": lambda x: recurrent(nn.GRU, x),
    "RNN": lambda x: recurrent(nn.RNN, x),
    "LSTM cell": lambda x: torch.lstm_cell(x, (ones(x, 4, 1), ones(x, 4, 1)), x, x[:, :1]),
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None], x[0]),
    "transposed convolution": lambda x: F.conv_transpose1d(x[None], x[:, :, None], x[0]),
    "linear": lambda x: F.linear(x, x, x[0]),
    "bilinear": lambda x: F.bilinear(x, x, x.expand(2, 4, 4)),
    "addmm": lambda x: torch.addmm(x, x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "prelu": lambda x: F.prelu(x, x[0]),
    "grid sample": lambda x: F.grid_sample(heads(x), x.reshape(1, 2, 4, 2), align_corners=False),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "embedding bag": lambda x: F.embedding_bag(torch.tensor([[0, 1]], device=x.device), x, mode="sum"),
    "max pool": lambda x: F.max_pool2d(heads(x), 2, return_indices=True)[0],
    "lerp": lambda x: torch.lerp(x, x + 1, x * 2),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "svd": lambda x: [torch.linalg.svd(square(x))[1], *map(torch.abs, torch.linalg.svd(square(x))[::2])],
    "eigh": lambda x: [torch.linalg.eigh(square(x))[0], torch.linalg.eigh(square(x))[1].abs()],
    "qr": lambda x: torch.linalg.qr(square(x)),
    "slogdet": lambda x: torch.linalg.slogdet(square(x)),
    "lu": lambda x: torch.linalg.lu(square(x))[1:],
    "lu_factor": lambda x: torch.linalg.lu_factor(square(x))[0],
    "solve_ex": lambda x: torch.linalg.solve_ex(square(x), x[:3])[0],
    "solve_triangular": lambda x: torch.linalg.solve_triangular(square(x).triu(), x[:3], upper=True),
    "cholesky": lambda x: torch.linalg.cholesky(square(x) @ square(x)),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "max": lambda x: x.max(0)[0],
    "topk": lambda x: x.topk(2)[0],
    "cummax": lambda x: x.cummax(0)[0],
    "frexp": lambda x: torch.frexp(x)[0],
    "polar and angle": lambda x: [x.unbind(0)[0], x.abs().log()],
    "unbind": lambda x: x.unbind(0),
    "split": lambda x: x.split([1, 3]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "foreach": lambda x: torch._foreach_mul([x, x * 2], [x, x]),
}


def results(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.Tensor]:
    returned = function(x)
    given = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return [r for r in given if isinstance(r, torch.Tensor) and r.requires_grad]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_some_results_have_no_gradient(name: str) -> None:
    host = torch.linspace(-1, 1.1, 16).sin().roll(3).reshape(4, 4) * 2
    function = FUNCTIONS[name]
    count = len(results(function, host.clone().requires_grad_()))
    assert count
    for used in (None, *range(count)):
        gradients = []
        for device in ("cpu", "tpu"):
            x = host.clone().to(device).requires_grad_()
            total = x.sum()
            for n, result in enumerate(results(function, x)):
                # One result is used alone; or each has a gradient that is None.
                if used is None:
                    total = total + Stop.apply(result).sum()
                elif used == n:
                    total = total + (result * result).sum()
            total.backward()
            gradients.append(x.grad.cpu())
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4, msg=f"{name}: {used}")
        if used is None:
            assert torch.equal(gradients[1], torch.ones(4, 4))


@pytest.mark.parametrize("name", ["attention", "layer norm", "convolution", "LSTM"])
def test_in_fused_and_compiled_programs(name: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return sum((Stop.apply(r).sum() for r in results(FUNCTIONS[name], x)), start=x.sum())

    x = torch.ones(4, 4, device="tpu", requires_grad=True)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        step(x).backward()
    assert torch.equal(x.grad.cpu(), torch.ones(4, 4))
    if name != "LSTM":  # a module made inside
        x.grad = None
        torch.compile(step)(x).backward()
        assert torch.equal(x.grad.cpu(), torch.ones(4, 4))
