"""Normalisation layers against the CPU: values, gradients, running statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tools.compare import check, check_opinfo

FLOATS = (torch.float32, torch.float64)
# Sums run in another order than the CPU's.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# The CPU rounds statistics or intermediate gradients to bfloat16; the device keeps them in float32.
ROUNDED = {"rtol": 3e-2, "atol": 6e-2}


@pytest.mark.parametrize(
    "name",
    ["nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.group_norm", "nn.functional.batch_norm"],
)
def test_functional(name: str) -> None:
    check_opinfo(name, FLOATS, samples=4, **CLOSE)
    check_opinfo(name, (torch.bfloat16,), samples=2, **ROUNDED)


@pytest.mark.parametrize("name", ["native_layer_norm", "native_batch_norm", "_native_batch_norm_legit"])
def test_native(name: str) -> None:
    # In evaluation the CPU returns empty saved statistics, every other device (and PyTorch's meta kernel) full ones.
    check_opinfo(name, FLOATS, samples=4, skip=lambda s: s.args[4:5] == (False,), **CLOSE)


@pytest.mark.parametrize("name", ["nn.functional.instance_norm", "nn.functional.local_response_norm", "renorm"])
def test_composites(name: str) -> None:
    check_opinfo(name, samples=3, **CLOSE)


def _run(module: nn.Module, *inputs: torch.Tensor, steps: int = 2) -> None:
    """Output, every gradient and every buffer of `module` on the device equal the CPU's, over some steps."""

    def call(parameters: dict, buffers: dict, *xs: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.func.functional_call(module, (parameters, buffers), xs) for _ in range(steps)]
        return [*results, *buffers.values()]

    parameters = {k: v.detach().clone().requires_grad_() for k, v in module.named_parameters()}
    buffers = {k: v.detach().clone() for k, v in module.named_buffers()}
    check(call, parameters, buffers, *(x.requires_grad_() for x in inputs), strides=False, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("module", [
    nn.BatchNorm1d(3), nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, affine=False),
    nn.BatchNorm3d(3, track_running_stats=False), nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
], ids=str)  # fmt: skip
def test_running_statistics(module: nn.Module, training: bool) -> None:
    torch.manual_seed(0)
    shape = {"1d": (5, 3, 4), "2d": (5, 3, 4, 2), "3d": (2, 3, 4, 2, 3)}[type(module).__name__[-2:]]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    _run(module.train(training), torch.randn(shape) * 3 + 1)


@pytest.mark.parametrize(
    "module", [nn.LayerNorm((4, 2)), nn.LayerNorm((4, 2), bias=False), nn.RMSNorm(2), nn.GroupNorm(3, 6),
               nn.GroupNorm(1, 6)],
    ids=str,
)  # fmt: skip
def test_layers(module: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    _run(module, torch.randn(3, 6, 4, 2) * 3 + 1)


def test_channels_last() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)
    for module in (nn.BatchNorm2d(6), nn.GroupNorm(2, 6)):
        device_module = type(module)(*((6,) if isinstance(module, nn.BatchNorm2d) else (2, 6))).to("tpu")
        want, got = module(x), device_module(x.to("tpu"))
        torch.testing.assert_close(got.cpu(), want, **CLOSE)
        assert got.is_contiguous(memory_format=torch.channels_last) == want.is_contiguous(
            memory_format=torch.channels_last
        )


def test_large_mean_keeps_the_variance() -> None:
    """A one-pass variance of these is off by more than the variance itself; a float32 step at 3e4 is 2e-3."""
    x = torch.randn(4, 1000) + 3e4
    rows = torch.nn.functional.layer_norm(x.double(), (1000,)).float()
    y, close = x.to("tpu"), {"rtol": 0, "atol": 4e-3}
    torch.testing.assert_close(torch.nn.functional.layer_norm(y, (1000,)).cpu(), rows, **close)
    torch.testing.assert_close(torch.nn.functional.batch_norm(y.T, None, None, training=True).T.cpu(), rows, **close)
    torch.testing.assert_close(torch.nn.functional.group_norm(y[None], 4)[0].cpu(), rows, **close)


@pytest.mark.parametrize("parameters", [None, torch.bfloat16, torch.float32])
def test_statistics_have_the_dtype_of_the_parameters(parameters: torch.dtype | None) -> None:
    """None: that of the input."""
    x = torch.randn(4, 3, 8).bfloat16()
    weight, bias, mean, var = (
        None if parameters is None else f(3).to(parameters) for f in (torch.randn,) * 3 + (torch.rand,)
    )
    row = None if parameters is None else torch.randn(8).to(parameters)
    check(torch.native_layer_norm, x, [8], row, row, 1e-5, **ROUNDED)
    check(torch.native_group_norm, x, weight, bias, 4, 3, 8, 3, 1e-5, **ROUNDED)
    check(torch.native_batch_norm, x, weight, bias, mean, var, True, 0.1, 1e-5, **ROUNDED)


def test_batch_norm_saves_nothing_in_evaluation() -> None:
    x, parameters = torch.randn(4, 3, 8), [torch.rand(3) for _ in range(4)]
    check(torch.native_batch_norm, x, *parameters, False, 0.1, 1e-5, **CLOSE)
    check(torch.ops.aten._native_batch_norm_legit_no_training, x, *parameters, 0.1, 1e-5, **CLOSE)


def test_empty_batches() -> None:
    check(lambda x: torch.nn.functional.layer_norm(x, (3,)), torch.randn(0, 3))
    check(lambda x: torch.nn.functional.rms_norm(x, (3,)), torch.randn(0, 3))
    check(lambda x: torch.nn.functional.group_norm(x, 2), torch.randn(0, 4, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    v, g = torch.randn(4, 5), torch.rand((4, 1) if dim == 0 else (1, 5))
    check(lambda v, g: torch._weight_norm(v, g, dim), v.requires_grad_(), g.requires_grad_(), **CLOSE)


def test_update_statistics() -> None:
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    check(torch.batch_norm_update_stats, x, mean, var, 0.1, **CLOSE)


def test_functional_forms() -> None:
    x, weight, bias = torch.randn(4, 3, 5), torch.randn(3), torch.randn(3)
    mean, var = torch.randn(3), torch.rand(3)
    aten = torch.ops.aten
    check(lambda *a: aten._native_batch_norm_legit_functional(*a, True, 0.1, 1e-5), x, weight, bias, mean, var, **CLOSE)
    check(lambda *a: aten._batch_norm_with_update(*a, 0.1, 1e-5), x, weight, bias, mean, var, **CLOSE)
    check(lambda *a: aten._batch_norm_with_update_functional(*a, 0.1, 1e-5), x, weight, bias, mean, var, **CLOSE)
    check(lambda *a: aten._batch_norm_no_update(*a, 0.1, 1e-5)[0], x, weight, bias, mean, var, **CLOSE)
    check(lambda *a: aten._native_batch_norm_legit_no_training(*a, 0.1, 1e-5)[0], x, weight, bias, mean, var, **CLOSE)


def test_synchronised_pieces_make_a_batch_norm() -> None:
    """Two halves of a batch through SyncBatchNorm's steps equal batch_norm of the whole."""
    torch.manual_seed(0)
    x, weight, bias, grad = torch.randn(6, 3, 4), torch.randn(3), torch.randn(3), torch.randn(6, 3, 4)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    running_mean, running_var = torch.zeros(3), torch.ones(3)
    want = torch.nn.functional.batch_norm(leaves[0], running_mean, running_var, *leaves[1:], training=True)
    want.backward(grad)

    halves = [h.to("tpu") for h in x.split([2, 4])]
    w, b, new_mean, new_var = (t.to("tpu") for t in (weight, bias, torch.zeros(3), torch.ones(3)))
    own = [torch.batch_norm_stats(h, 1e-5) for h in halves]
    counts = torch.tensor([8.0, 16.0], device="tpu")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        halves[0],
        torch.stack([s[0] for s in own]),
        torch.stack([s[1] for s in own]),
        new_mean,
        new_var,
        0.1,
        1e-5,
        counts,
    )
    got = torch.cat([torch.batch_norm_elemt(h, w, b, mean, invstd, 1e-5) for h in halves])
    torch.testing.assert_close(got.cpu(), want.detach(), **CLOSE)
    torch.testing.assert_close(new_mean.cpu(), running_mean, **CLOSE)
    torch.testing.assert_close(new_var.cpu(), running_var, **CLOSE)

    grads = [g.to("tpu") for g in grad.split([2, 4])]
    reduced = [
        torch.batch_norm_backward_reduce(g, h, mean, invstd, w, True, True, True)
        for g, h in zip(grads, halves, strict=True)
    ]
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = (sum(parts) for parts in zip(*reduced, strict=True))
    torch.testing.assert_close(grad_weight.cpu(), leaves[1].grad, **CLOSE)
    torch.testing.assert_close(grad_bias.cpu(), leaves[2].grad, **CLOSE)
    grad_x = [
        torch.batch_norm_backward_elemt(g, h, mean, invstd, w, sum_dy, sum_dy_xmu, counts.int())
        for g, h in zip(grads, halves, strict=True)
    ]
    torch.testing.assert_close(torch.cat(grad_x).cpu(), leaves[0].grad, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_each_gradient_goes_to_its_own_parameter(wanted: tuple[bool, ...], training: bool) -> None:
    """Whichever of input, weight and bias need a gradient."""
    of = torch.nn.functional
    x, weight, bias = torch.randn(4, 6, 5), torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)
    x, weight, bias = (t.requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True))
    mean, var = torch.linspace(-1, 1, 6), torch.linspace(1, 2, 6)
    check(lambda x, w, b, m, v: of.batch_norm(x, m, v, w, b, training).pow(3), x, weight, bias, mean, var, **ROUNDED)
    check(lambda x, w, b: of.instance_norm(x, None, None, w, b).pow(3), x, weight, bias, **ROUNDED)
    check(lambda x, w, b: of.group_norm(x, 2, w, b).pow(3), x, weight, bias, **ROUNDED)
    check(lambda x, w, b: of.layer_norm(x.mT, (6,), w, b).pow(3), x, weight, bias, **ROUNDED)
    kernel = torch.randn(6, 6, 3).requires_grad_(wanted[1])
    check(lambda x, k, b: of.conv1d(x, k, b, padding=1).pow(2), x, kernel, bias, **ROUNDED)
