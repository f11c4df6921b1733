"""A key-value cache is written where it lies: no program that writes to one holds a copy of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import StaticCache

from tests.compile.families import FAMILIES, build
from tests.compile.programs import compiled, plans_of
from torch_tpu import compile as tpu_compile
from torch_tpu.eager.program.plan import Plan

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
SIZES = (2, 4, 2048, 16)


def put_batches(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    batch, head = torch.arange(2, device=at.device), torch.arange(4, device=at.device)
    return cache.index_put_((batch[:, None, None], head[None, :, None], at[None, None, :]), new)


def put_twice(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> None:
    cache[:, :, at] = new
    cache[:, :, at + 1] = -new


def put_and_attend(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, at, new)
    return F.scaled_dot_product_attention(new, cache, cache)


WRITES: dict[str, Write] = {
    "index_copy_": lambda cache, new, at: cache.index_copy_(2, at, new),
    "index_put_": put_batches,
    "slice": lambda cache, new, at: cache.__setitem__((slice(None), slice(None), at), new),
    "scatter_": lambda cache, new, at: cache.scatter_(2, at.view(1, 1, 1, 1).expand(2, 4, 1, 16), new),
    "twice": put_twice,
    "attention": put_and_attend,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_no_copy(name: str) -> None:
    write = WRITES[name]
    cache, new, at = torch.rand(SIZES), torch.rand(2, 4, 1, 16), torch.tensor([7])
    want = cache.clone()
    write(want, new, at)

    def step(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        returned = write(cache, new, at)
        return new + 1 if returned is None or returned is cache else new + returned

    device = cache.to("tpu")
    shown = tpu_compile.debug(step, device, new.to("tpu"), at.to("tpu"))
    torch.testing.assert_close(device.cpu(), want)
    assert shown.memory["alias"] >= cache.nbytes
    assert shown.memory["temporary"] < cache.nbytes / 4


def test_a_static_cache_of_transformers_is_no_copy() -> None:
    model, inputs = build(FAMILIES["llama"])
    model.generation_config.eos_token_id = None
    model.to("tpu")
    prompt = inputs["input_ids"][:, :5].to("tpu")
    cache = StaticCache(model.config, max_cache_len=2048)
    torch.compiler.reset()
    plans: list[Plan] = plans_of(
        lambda: model.generate(prompt, max_new_tokens=3, past_key_values=cache, do_sample=False)
    )
    assert len(plans) == 1
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    statistics = plans[0].compiled().loaded.get_compiled_memory_stats()
    assert statistics.alias_size_in_bytes >= nbytes
    # The model repeats keys and values for the queries' heads, a layer after the other.
    repeats = model.config.num_attention_heads // model.config.num_key_value_heads
    assert statistics.temp_size_in_bytes < (repeats / len(cache.layers) + 1 / 4) * nbytes


@pytest.mark.parametrize("kind", ["its own", "a later one", "one of what was written"])
def test_nothing_is_written_where_a_condition_fails(kind: str) -> None:
    def step(cache: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, at, torch.ones(1, device=cache.device))
        if kind == "its own":
            return cache + 1
        found = row if kind == "a later one" else (cache.sum() * 100).long()
        return torch.arange(4, device=cache.device)[found.reshape(1)]

    run = compiled(step)
    cache = torch.zeros(6, device="tpu")
    bad, good = torch.tensor([6], device="tpu"), torch.tensor([1], device="tpu")
    at, row = (bad, good) if kind == "its own" else (good, bad)
    with pytest.raises(IndexError, match="out of bounds"):
        run(cache, at, row)
    assert cache.tolist() == [0.0] * 6
