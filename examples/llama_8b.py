"""Llama-3-8B with random bfloat16 weights: training with AdamW, or decoding with a static cache of keys and values.

    torch-tpu plan examples/llama_8b.py train --batch 1 --sequence 2048 --target v5p:2x2x1
    torch-tpu plan examples/llama_8b.py decode --batch 8 --sequence 4096 --target v6e:1x1
    torch-tpu plan examples/llama_8b.py decode --batch {batch} --target v6e:1x1 --find-max batch=1:128

The same script runs on a TPU. Weights are made on the device, so a plan needs no memory for them.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


def model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    with torch.device("tpu"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def train(given: argparse.Namespace) -> None:
    llama = model(given.layers)
    llama.train()
    if given.checkpoint:
        llama.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4)
    for _ in range(given.steps):
        tokens = torch.randint(0, 128256, (given.batch, given.sequence)).to("tpu")
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())


@torch.no_grad()
def decode(given: argparse.Namespace) -> None:
    llama = model(given.layers)
    llama.eval()
    cache = StaticCache(config=llama.config, max_cache_len=given.sequence)
    tokens = torch.zeros(given.batch, 1, dtype=torch.int64).to("tpu")
    for position in range(given.steps):
        at = torch.tensor([[position]]).expand(given.batch, 1).to("tpu")
        logits = llama(input_ids=tokens, position_ids=at, past_key_values=cache, use_cache=True).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
    print(tokens.cpu())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("train", "decode"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in backward")
    given = parser.parse_args()
    (train if given.task == "train" else decode)(given)


if __name__ == "__main__":
    main()
