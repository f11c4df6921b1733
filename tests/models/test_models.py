"""Whole models on the device: forward, backward and optimizer steps equal the CPU's, without any fallback."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.compare import no_fallback
from tests.models.builders import MODELS, optimizers


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_cpu(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss_of = MODELS[name]()
    on_device = copy.deepcopy(model).to("tpu")
    device_inputs = {k: v.to("tpu") for k, v in inputs.items()}
    kinds = list(optimizers(model.parameters()))
    with no_fallback():
        for step, kind in enumerate(kinds):
            losses = []
            for network, given in ((model, inputs), (on_device, device_inputs)):
                optimizer = optimizers(network.parameters())[kind]
                optimizer.zero_grad()
                loss = loss_of(network, given)
                loss.backward()
                if step == 0:
                    losses.append(loss)
                    continue
                optimizer.step()
                losses.append(loss)
            torch.testing.assert_close(losses[1].detach().cpu(), losses[0].detach(), rtol=2e-4, atol=2e-5)
            if step == 0:
                for (label, want), got in zip(model.named_parameters(), on_device.parameters(), strict=True):
                    assert (want.grad is None) == (got.grad is None), label
                    if want.grad is not None:
                        torch.testing.assert_close(
                            got.grad.cpu(), want.grad, rtol=1e-3, atol=1e-5, msg=lambda m, label=label: f"{label}: {m}"
                        )
    for (label, want), got in zip(model.named_parameters(), on_device.parameters(), strict=True):
        # Adam divides by the gradient's size, so where a gradient is almost zero its sign decides the step.
        torch.testing.assert_close(
            got.detach().cpu(), want.detach(), rtol=1e-3, atol=2.5e-3, msg=lambda m, label=label: f"{label}: {m}"
        )
    for (label, want), got in zip(model.named_buffers(), on_device.buffers(), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4, msg=lambda m, label=label: f"{label}: {m}")


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
