"""Autograd on the device: the same values, versions, hooks and errors as on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.norm(F.gelu(self.first(x)))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.last(hidden)


def assert_same(actual, expected):
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def leaf(x):
    return x.to("tpu").requires_grad_()


def test_gradients_of_a_network_and_their_accumulation():
    reference, module = Network(), Network()
    module.load_state_dict(reference.state_dict())
    module.to("tpu")
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        expected, actual = reference(x).pow(2).mean(), module(x.to("tpu")).pow(2).mean()
        expected.backward()
        actual.backward()
        assert_same(actual, expected)
    for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.tanh, torch.sqrt, torch.relu])
def test_a_saved_result_shares_the_storage(function):
    y = function(leaf(torch.rand(3, 4)))
    values, node = y.detach().cpu(), y.grad_fn
    assert node._saved_result.untyped_storage() is y.untyped_storage()
    del y
    gc.collect()
    assert torch.equal(node._saved_result.detach().cpu(), values)


def test_retain_graph():
    x = leaf(torch.rand(3))
    y = (x.exp() * x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert_same(x.grad, (2 * once).cpu())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_custom_function():
    x = leaf(torch.rand(3))
    Square.apply(x).sum().backward()
    assert_same(x.grad, 2 * x.detach().cpu())


def test_hooks():
    x = leaf(torch.rand(3))
    seen = []
    x.register_hook(lambda gradient: gradient * 2)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))
    y = x * 3
    y.retain_grad()
    y.register_hook(lambda gradient: seen.append("y"))
    y.sum().backward()
    assert seen == ["y", 18]
    assert x.grad.tolist() == [6, 6, 6]
    assert y.grad.tolist() == [1, 1, 1]


def test_module_hooks():
    module = nn.Linear(3, 2).to("tpu")
    seen = []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0].device.type))
    module(leaf(torch.rand(1, 3))).sum().backward()
    assert seen == ["forward", "tpu"]


def test_an_in_place_write_invalidates_what_was_saved():
    x = leaf(torch.rand(3))
    y = x.exp()
    version = y._version
    y.add_(1)
    assert y._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_writes_through_views():
    weights = torch.arange(16.0).reshape(4, 4)

    def run(x):
        y = x * 1
        view = y[1:3, ::2]
        view.mul_(10)
        assert view._version == y._version
        assert view._is_view()
        assert view._base is y
        y.t()[0].zero_()
        y[3, 1] = 5
        (y * weights.to(x.device)).sum().backward()
        return y

    x = torch.rand(4, 4, requires_grad=True)
    on_device = leaf(x.detach())
    expected, actual = run(x), run(on_device)
    assert_same(actual, expected)
    assert_same(on_device.grad, x.grad)


def test_no_grad_and_inference_mode():
    x = leaf(torch.rand(3))
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.add_(1)
    with torch.inference_mode():
        y = x * 2
        made = torch.ones(3, device="tpu")
        y.add_(made)
        assert y.is_inference()
        assert made.is_inference()
        assert y.view(3, 1).is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors"):
        (y * x).sum().backward()


def test_double_backward():
    x = leaf(torch.rand(3))
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert_same(x.grad, 6 * x.detach().cpu())


def test_gradcheck():
    x = leaf(torch.rand(2, 3, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda t: F.softmax(t, -1).sin(), (x,))
    assert torch.autograd.gradgradcheck(lambda t: t.sigmoid(), (x,))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_with_dropout(use_reentrant):
    module = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).to("tpu")
    x = leaf(torch.rand(2, 32))
    torch.manual_seed(1)
    module(x).relu().sum().backward()
    expected = x.grad.cpu()
    x.grad = None
    torch.manual_seed(1)
    checkpoint(lambda t: module(t).relu(), x, use_reentrant=use_reentrant).sum().backward()
    assert_same(x.grad, expected)


def test_anomaly_mode():
    with torch.autograd.detect_anomaly(check_nan=True):
        leaf(torch.rand(3)).exp().sum().backward()
        with pytest.raises(RuntimeError, match="nan values"):
            (leaf(torch.full((2,), -1.0)).sqrt() * 0).sum().backward()


def test_saved_tensor_hooks():
    x = leaf(torch.rand(3))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.device.type), t)[1], lambda t: t):
        y = x.exp()
    y.sum().backward()
    assert packed == ["tpu"]
    expected = x.grad.cpu()
    x.grad = None
    with torch.autograd.graph.save_on_cpu():
        y = x.exp()
    y.sum().backward()
    assert_same(x.grad, expected)
    x.grad = None
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        y = x.exp()
    y.sum().backward()
    assert_same(x.grad, expected)


def test_forward_mode():
    x, tangent = torch.rand(3), torch.rand(3)
    with forward_ad.dual_level():
        expected = forward_ad.unpack_dual(forward_ad.make_dual(x, tangent).sin()).tangent
        actual = forward_ad.unpack_dual(forward_ad.make_dual(x.to("tpu"), tangent.to("tpu")).sin()).tangent
        assert_same(actual, expected)


def test_function_transforms():
    def function(x):
        return (x.sin() * x.prod()).sum()

    x, tangent = torch.rand(3), torch.rand(3)
    on_device = x.to("tpu")
    assert_same(torch.func.grad(function)(on_device), torch.func.grad(function)(x))
    assert_same(torch.func.hessian(function)(on_device), torch.func.hessian(function)(x))
    assert_same(torch.func.jacrev(torch.tanh)(on_device), torch.func.jacrev(torch.tanh)(x))
    assert_same(torch.func.jacfwd(torch.tanh)(on_device), torch.func.jacfwd(torch.tanh)(x))
    assert_same(
        torch.func.jvp(torch.tanh, (on_device,), (tangent.to("tpu"),))[1],
        torch.func.jvp(torch.tanh, (x,), (tangent,))[1],
    )
    batch = torch.rand(4, 3)
    per_sample = torch.func.vmap(torch.func.grad(function))
    assert_same(per_sample(batch.to("tpu")), per_sample(batch))


def test_functional_call():
    module = nn.Linear(3, 2)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    on_device = {name: parameter.to("tpu") for name, parameter in parameters.items()}
    x = torch.rand(1, 3)
    expected = torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,)).sum())(parameters)
    actual = torch.func.grad(lambda p: torch.func.functional_call(module, p, (x.to("tpu"),)).sum())(on_device)
    for name in parameters:
        assert_same(actual[name], expected[name])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}])
def test_optimizers(options):
    reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    module.load_state_dict(reference.state_dict())
    module.to("tpu")
    x = torch.randn(3, 4)
    for network, batch, chosen in ((reference, x, {}), (module, x.to("tpu"), options)):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, **chosen)
        for _ in range(3):
            optimizer.zero_grad()
            network(batch).pow(2).sum().backward()
            optimizer.step()
    for theirs, ours in zip(reference.parameters(), module.parameters(), strict=True):
        assert_same(ours, theirs)


def test_no_cycle_keeps_memory_alive():
    torch.tpu.synchronize()
    gc.collect()
    gc.disable()
    try:
        before = torch.tpu.memory_allocated()
        x = torch.rand(1 << 14).to("tpu").requires_grad_()
        (x.exp() * x).sum().backward()
        del x
        assert torch.tpu.memory_allocated() == before
    finally:
        gc.enable()


def _fail(*args: object) -> None:
    raise ZeroDivisionError("of the hook")


def _tensor_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(_fail)
    return y


def _leaf_hook(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(_fail)
    return x * 2


def _accumulation_hook(x: torch.Tensor) -> torch.Tensor:
    x.register_post_accumulate_grad_hook(_fail)
    return x * 2


def _node_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.grad_fn.register_hook(_fail)
    return y


def _node_pre_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.grad_fn.register_prehook(_fail)
    return y


def _module_hook(x: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Linear(3, 3).to("tpu")
    module.register_full_backward_hook(_fail)
    return module(x)


def _saved_tensor_hook(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _fail):
        return x * x


@pytest.mark.parametrize(
    "function",
    [_tensor_hook, _leaf_hook, _accumulation_hook, _node_hook, _node_pre_hook, _module_hook, _saved_tensor_hook],
)
def test_an_exception_in_a_hook_reaches_the_caller(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It once ended the process."""
    x = torch.ones(3, device="tpu", requires_grad=True)
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        function(x).sum().backward()
    (x.detach() * 2).requires_grad_().sum().backward()
