"""Fake quantisation: per tensor, per channel, learned, observed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from tools.compare import check, no_fallback
from torch_tpu import metrics

aten = torch.ops.aten
# Sums of rounding errors, which cancel.
NEAR = {"rtol": 1e-5, "atol": 1e-5}
VALUES = torch.linspace(-3, 3, 41).reshape(41, 1) * torch.tensor([1.0, 0.5, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_per_tensor(dtype: torch.dtype) -> None:
    x = VALUES.to(dtype).requires_grad_()
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), x)


def test_per_tensor_takes_new_numbers_without_a_compile() -> None:
    x = VALUES.tpu()
    torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7)
    before = metrics.counters().get("compile", 0)
    again = torch.fake_quantize_per_tensor_affine(x, 0.2, -2, -8, 7)
    assert metrics.counters().get("compile", 0) == before
    torch.testing.assert_close(again.cpu(), torch.fake_quantize_per_tensor_affine(VALUES, 0.2, -2, -8, 7))


def test_per_tensor_compiles() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.037, 3, -128, 127)

    torch.testing.assert_close(torch.compile(run, backend="tpu", fullgraph=True)(VALUES.tpu()).cpu(), run(VALUES))


@pytest.mark.parametrize("enabled", [0, 1])
def test_parameters_in_tensors(enabled: int) -> None:
    def run(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, on: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale, zero, on, 0, 15)

    check(run, VALUES, torch.tensor([0.3]), torch.tensor([7], dtype=torch.int32), torch.tensor([enabled]))


@pytest.mark.parametrize("zero", [torch.tensor([0, 3, -8], dtype=torch.int32), torch.tensor([0.5, -1.2, 3.0])])
def test_per_channel(zero: torch.Tensor) -> None:
    scale = torch.tensor([0.1, 0.25, 1.0])
    check(
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 1, -8, 7), VALUES.requires_grad_(), scale, zero
    )


def test_strides_are_those_of_the_input() -> None:
    x, on = VALUES.detach().T, torch.tensor([1])
    scale, zero = torch.tensor([0.3]), torch.tensor([7], dtype=torch.int32)
    check(lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, -8, 7), x)
    check(lambda *t: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*t, 0, 15), x, scale, zero, on)
    check(lambda *t: aten.fake_quantize_per_channel_affine_cachemask(*t, 0, 0, 15), x, scale.repeat(3), zero.repeat(3))


def test_zero_point_outside_the_range() -> None:
    with pytest.raises(RuntimeError, match="`zero_point` must be between"):
        torch.fake_quantize_per_tensor_affine(VALUES.detach().tpu(), 0.1, 9, -8, 7)


@pytest.mark.parametrize("zero", [0.0, 1.5, -2.5, 40.0])
def test_learned_per_tensor(zero: float) -> None:
    x, scale = VALUES.detach().requires_grad_(), torch.tensor([0.17], requires_grad=True)
    point = torch.tensor([zero], requires_grad=True)
    function = torch._fake_quantize_learnable_per_tensor_affine
    check(lambda *t: function(*t, -8, 7, 0.5), x, scale, point, **NEAR)


def test_learned_per_channel() -> None:
    x, scale = VALUES.detach().requires_grad_(), torch.tensor([0.17, 0.3, 0.05], requires_grad=True)
    point = torch.tensor([0.0, 1.5, -20.0], requires_grad=True)
    function = torch._fake_quantize_learnable_per_channel_affine
    check(lambda *t: function(*t, 1, -8, 7, 0.25), x, scale, point, **NEAR)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shift", [0.0, 4.0, -4.0, 1e-6])
def test_moving_average_observer(symmetric: bool, by_row: bool, shift: float) -> None:
    x = torch.stack([VALUES.detach()[:, 0] + shift, VALUES.detach()[:, 1] * 3])
    x = x * 1e-6 if shift == 1e-6 else x
    count = 2 if by_row else 1

    def run(x: torch.Tensor, on: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.fused_moving_avg_obs_fake_quant(x, on, on, *state, 0.1, -128, 127, 0, by_row, symmetric)
        return first, torch.fused_moving_avg_obs_fake_quant(x * 2, on, on, *state, 0.1, -128, 127, 0, by_row, symmetric)

    state = (torch.full((count,), torch.inf), torch.full((count,), -torch.inf), torch.ones(count))
    check(run, x, torch.tensor([1]), *state, torch.zeros(count, dtype=torch.int32))


def test_observer_that_is_off_changes_nothing() -> None:
    state = (torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2], dtype=torch.int32))
    x, off = VALUES.detach(), torch.tensor([0])
    check(lambda x, *t: aten._fused_moving_avg_obs_fq_helper(x, *t, 0.1, -128, 127, 0), x, off, off, *state)


def test_quantization_aware_training() -> None:
    """With the default observers, whose state for the rows of a weight is empty at first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        on_host = torch.ao.quantization.prepare_qat(model)
    on_device = copy.deepcopy(on_host).to("tpu")
    x = torch.randn(8, 4)
    with no_fallback():
        for _ in range(2):
            got, want = on_device(x.tpu()), on_host(x)
        got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(on_device[0].weight.grad.cpu(), on_host[0].weight.grad)
    torch.testing.assert_close(on_device[0].weight_fake_quant.scale.cpu(), on_host[0].weight_fake_quant.scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dequantize_of_plain_numbers(dtype: torch.dtype) -> None:
    check(torch.dequantize, torch.tensor([0.5, -2.0], dtype=dtype))
