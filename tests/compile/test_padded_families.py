"""Models of Transformers with `options={"buckets": True}`: lengths and batches that vary need few programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compile.families import FAMILIES, VOCABULARY, build
from tests.compile.test_buckets import bucketed, fresh, programs, unpadded  # noqa: F401  (a fixture)
from tools.compare import no_fallback

Inputs = dict[str, torch.Tensor]
# Of the first comes a program of its own; the others are in buckets of 8, 16, 32 and 64.
SIZES = (10, 7, 23, 14, 31, 5, 40, 19, 12, 33, 28, 55)
LONGEST = 64
MOST = 6  # one more where two lengths vary


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def _labels(batch: int, length: int) -> torch.Tensor:
    """Labels of which some are ignored."""
    labels = _ids(batch, length)
    labels[0, -2:] = labels[-1, 0] = -100
    return labels


def _mask(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0
    return mask


def _text(n: int) -> Inputs:
    return {"input_ids": _ids(3, n), "labels": _labels(3, n)}


def _masked_text(n: int) -> Inputs:
    return {**_text(n), "attention_mask": _mask(3, n)}


def _classified_text(n: int) -> Inputs:
    return {"input_ids": _ids(3, n), "attention_mask": _mask(3, n), "labels": torch.tensor([2, 0, 1])}


def _pair(n: int) -> Inputs:
    return {"input_ids": _ids(3, n), "labels": _labels(3, LONGEST - n)}


def _images(n: int) -> Inputs:
    return {"pixel_values": torch.randn(n, 3, 32, 32), "labels": torch.randint(3, (n,))}


def _sound(n: int) -> Inputs:
    return {"input_features": torch.randn(3, 8, 20), "labels": _labels(3, n)}


# The inputs, and what the configuration of `FAMILIES` lacks for the longest.
CASES: dict[str, tuple[Callable[[int], Inputs], dict[str, Any]]] = {
    "llama": (_text, {"max_position_embeddings": LONGEST}),
    "qwen2": (_masked_text, {"max_position_embeddings": LONGEST}),
    "qwen3": (_text, {"max_position_embeddings": LONGEST}),
    "gpt2": (_masked_text, {"n_positions": LONGEST}),
    "bert": (_classified_text, {"max_position_embeddings": LONGEST}),
    "t5": (_pair, {}),
    "vit": (_images, {}),
    "whisper": (_sound, {"max_target_positions": LONGEST}),
}
EVERYDAY = ("llama", "t5")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in EVERYDAY else pytest.mark.rare) for n in CASES])
def test_training(name: str) -> None:
    make, config = CASES[name]
    family = FAMILIES[name]
    host, _ = build(family._replace(config={**family.config, **config}))
    device = copy.deepcopy(host).to("tpu")
    step = bucketed(device)
    sizes = SIZES[:4] if name in EVERYDAY else SIZES
    for size in sizes:
        inputs = make(size)
        with no_fallback():
            want, got = host(**inputs).loss, step(**{k: v.to("tpu") for k, v in inputs.items()}).loss
            want.backward()
            got.backward()
        torch.testing.assert_close(got.cpu(), want, rtol=2e-4, atol=2e-5)
        for (label, h), d in zip(host.named_parameters(), device.parameters(), strict=True):
            assert (h.grad is None) == (d.grad is None), label
            if h.grad is not None:
                torch.testing.assert_close(d.grad.cpu(), h.grad, rtol=1e-3, atol=2e-5, msg=f"gradient of {label}")
        host.zero_grad()
        device.zero_grad()
    assert not unpadded()
    assert max(programs()) <= (4 if name in EVERYDAY else MOST)


@pytest.mark.rare
@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    make, config = CASES[name]
    family = FAMILIES[name]
    host, _ = build(family._replace(config={**family.config, **config}))
    step = bucketed(copy.deepcopy(host).to("tpu"))
    with torch.no_grad(), no_fallback():
        for size in SIZES:
            inputs = make(size)
            want, got = host(**inputs).logits, step(**{k: v.to("tpu") for k, v in inputs.items()}).logits
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert not unpadded()
    assert max(programs()) <= MOST
