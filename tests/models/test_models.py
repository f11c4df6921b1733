"""Whole models on the device: forward, backward and optimizer steps equal the CPU's, without any fallback."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.models.builders import MODELS, OPTIMIZERS, Inputs
from tools.compare import no_fallback

TOLERANCE = 5e-5  # of parameters after two steps; the steps themselves are a hundred times larger


def _both(model: nn.Module, inputs: Inputs, on_device: nn.Module) -> list[tuple[nn.Module, Inputs]]:
    return [(model, inputs), (on_device, {k: v.to("tpu") for k, v in inputs.items()})]


def _assert_close(got: torch.Tensor, want: torch.Tensor, label: str, *, atol: float) -> None:
    torch.testing.assert_close(
        got.detach().cpu(), want.detach(), rtol=1e-3, atol=atol, msg=lambda message: f"{label}: {message}"
    )


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss_of = MODELS[name]()
    on_device = copy.deepcopy(model).to("tpu")
    with no_fallback():
        for kind in OPTIMIZERS:
            before = [p.detach().clone() for p in model.parameters()]
            pairs = [(m, given, OPTIMIZERS[kind](m.parameters())) for m, given in _both(model, inputs, on_device)]
            for _ in range(2):
                losses = []
                for network, given, optimizer in pairs:
                    optimizer.zero_grad()
                    loss = loss_of(network, given)
                    loss.backward()
                    losses.append(loss.detach().cpu())
                torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=2e-5)
                for (label, want), got in zip(model.named_parameters(), on_device.parameters(), strict=True):
                    assert (want.grad is None) == (got.grad is None), label
                    if want.grad is not None:
                        _assert_close(got.grad, want.grad, f"gradient of {label}", atol=1e-5)
                for _, _, optimizer in pairs:
                    optimizer.step()
            moved = max(
                (p.detach() - old).abs().max().item() for p, old in zip(model.parameters(), before, strict=True)
            )
            assert moved > 100 * TOLERANCE, f"{kind} moved nothing by more than {moved}"
            for (label, want), got in zip(model.named_parameters(), on_device.parameters(), strict=True):
                _assert_close(got, want, f"{label} after {kind}", atol=TOLERANCE)
    for (label, want), got in zip(model.named_buffers(), on_device.buffers(), strict=True):
        _assert_close(got, want, label, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_inference_equals_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss_of = MODELS[name]()
    model.eval()
    on_device = copy.deepcopy(model).to("tpu")
    with torch.inference_mode(), no_fallback():
        got = loss_of(on_device, {k: v.to("tpu") for k, v in inputs.items()})
        want = loss_of(model, inputs)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_greedy_generation_equals_cpu() -> None:
    torch.manual_seed(0)
    model, inputs, _ = MODELS["llama"]()
    model.eval()
    prompt = inputs["input_ids"][:, :5]
    want = model.generate(prompt, max_new_tokens=6, do_sample=False)
    on_device = copy.deepcopy(model).to("tpu")
    with no_fallback():
        got = on_device.generate(prompt.to("tpu"), max_new_tokens=6, do_sample=False)
    assert got.tolist() == want.tolist()
