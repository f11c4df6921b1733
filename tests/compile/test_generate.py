"""`generate()` of Transformers with compiled steps: how many programs it needs, and that the tokens are eager's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.compile.families import FAMILIES, build
from tools.compare import no_fallback
from torch_tpu import metrics

TOKENS = 10


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    yield
    torch.compiler.reset()


def _pair(name: str = "llama") -> tuple[Any, Any, torch.Tensor]:
    model, inputs = build(FAMILIES[name])
    model.generation_config.eos_token_id = None
    return model, copy.deepcopy(model).to("tpu"), inputs["input_ids"][:, :5]


def _programs_of_graphs() -> list[int]:
    """How many programs each graph captured since the reset has."""
    return [len(graph["programs"]) for graph in metrics.snapshot()["graphs"] if graph["programs"]]


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.rare) for name in ("gemma", "qwen2", "gpt2"))]
)
def test_a_static_cache_needs_one_program_for_all_tokens(name: str) -> None:
    model, device, prompt = _pair(name)
    want = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    with no_fallback():
        for _ in range(2):
            got = device.generate(
                prompt.to("tpu"), max_new_tokens=TOKENS, do_sample=False, cache_implementation="static"
            )
            assert got.tolist() == want.tolist()
            # The prompt runs eagerly; each token after the first one runs the graph.
            assert _programs_of_graphs() == [1]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_static_cache_of_one_length_needs_one_program_for_prompts_of_any() -> None:
    transformers = pytest.importorskip("transformers")
    model, device, prompt = _pair()
    for length in (5, 3, 4):
        want = model.generate(prompt[:, :length], max_new_tokens=4, do_sample=False)
        got = device.generate(
            prompt[:, :length].to("tpu"),
            max_new_tokens=4,
            do_sample=False,
            past_key_values=transformers.StaticCache(config=device.config, max_cache_len=16),
        )
        assert got.tolist() == want.tolist()
    assert _programs_of_graphs() == [1]


def test_sampled_tokens_are_those_of_eager() -> None:
    _, device, prompt = _pair()
    drawn = []
    for options in ({}, {"cache_implementation": "static"}):
        torch.manual_seed(3)
        drawn.append(
            device.generate(prompt.to("tpu"), max_new_tokens=TOKENS, do_sample=True, top_k=20, **options).tolist()
        )
    assert drawn[0] == drawn[1]
    assert _programs_of_graphs() == [1]


def test_a_growing_cache_is_captured_a_bounded_number_of_times() -> None:
    model, device, prompt = _pair()
    device.forward = torch.compile(device.forward, dynamic=True)
    captured = []
    for tokens in (TOKENS // 2, TOKENS):
        want = model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        with no_fallback():
            got = device.generate(prompt.to("tpu"), max_new_tokens=tokens, do_sample=False)
        assert got.tolist() == want.tolist()
        captured.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        # The prompt, and one length for each token after the first.
        assert sum(_programs_of_graphs()) <= tokens
    assert captured[0] == captured[1] <= 3
