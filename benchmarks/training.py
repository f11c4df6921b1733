"""Time of a training step, of the first step cold and warm, and memory: `python benchmarks/training.py`.

Models: a GPT, a residual CNN and an LSTM. Each is trained strict, fused, compiled and on CPU PyTorch; the GPT also in
JAX where it is installed (`pip install '.[bench]'`). Every measurement is a process of its own. One with an empty disk
cache gives the cold start, the next the warm one. `CPU` is processor time of all threads, which other programs of the
machine disturb less than the clock; with `--cores 1` none of it is spent waiting for other threads. The ratios are of
that time.

    --model gpt        only these models (may be repeated)
    --mode fused       only these modes (may be repeated)
    --steps 20         steps to measure
    --layers 24        another depth
    --cores 1          how many processors a measurement may use
    --rounds 1         how often all of it is done; the least of each figure counts
    --json FILE        also writes the figures
    --check            exits with 1 if a limit below is exceeded
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("gpt", "cnn", "lstm")
MODES = ("cpu", "strict", "fused", "compiled", "jax")
# Nothing may be compiled after so many steps.
WARM_UP = 3
# The least or the most of each ratio, for the models it is asked of.
FUSED_OVER_STRICT = 1.5
FUSED_OVER_JAX = 1.15
WARM_OVER_COLD = 0.15
DEPTHS = (3, 24)
DEEP_OVER_SHALLOW = 3.0

Figures = dict[str, Any]


def measure(model: str, mode: str, steps: int, layers: int | None) -> Figures:
    """What the child process prints."""
    import torch
    import training_models

    if mode == "jax":
        step = training_models.jax_step_of(layers)
    else:
        step = training_models.step_of(model, "cpu" if mode == "cpu" else "tpu", layers, mode == "compiled")
    on_device = mode not in ("cpu", "jax")
    if on_device:
        from torch_tpu import metrics
    times, processor, losses, compiled = [], [], [], []
    # A collection of all that Dynamo keeps takes as long as loading a program, and falls into compiling or loading.
    gc.disable()
    for i in range(WARM_UP + steps):
        if i == WARM_UP:
            gc.enable()
        began, began_processor = time.perf_counter(), time.process_time()
        losses.append(step())
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_processor)
        if on_device:
            counters = metrics.counters()
            compiled.append(counters.get("compile", 0) + counters.get("disk_cache_hit", 0))
    figures: Figures = {
        "first s": times[0],
        "first CPU s": processor[0],
        "start CPU s": sum(processor[:WARM_UP]),
        "step ms": statistics.median(times[WARM_UP:]) * 1e3,
        "step CPU ms": statistics.median(processor[WARM_UP:]) * 1e3,
        "resident MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": [losses[0], losses[-1]],
    }
    if on_device:
        figures |= {
            "programs": compiled[-1],
            "programs after step 3": compiled[-1] - compiled[WARM_UP - 1],
            "compiled": metrics.counters().get("compile", 0),
            "compile s": metrics.counters().get("compile_seconds", 0.0),
            "load s": metrics.counters().get("disk_cache_seconds", 0.0),
            "trace s": metrics.counters().get("trace_seconds", 0.0),
            "device MiB": torch.accelerator.max_memory_allocated() / 2**20,
        }
    return figures


def child(model: str, mode: str, steps: int, layers: int | None, cache: str) -> Figures:
    environment = {
        **os.environ,
        "TORCH_TPU_DEFER_AND_FUSE": "1" if mode == "fused" else "0",
        "TORCH_TPU_CACHE_DIR": cache,
    }
    command = [sys.executable, __file__, "--child", json.dumps([model, mode, steps, layers])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(model: str, mode: str, steps: int, layers: int | None) -> Figures:
    """One mode, cold; on the device also warm."""
    with tempfile.TemporaryDirectory() as cache:
        figures = child(model, mode, steps, layers, cache)
        if "programs" in figures:
            warm = child(model, mode, 1, layers, cache)
            for name in ("first s", "first CPU s", "compiled", "load s", "trace s"):
                figures[f"warm {name}"] = warm[name]
    return figures


def compile_seconds(layers: int) -> float:
    """Processor seconds that a GPT of this depth spends on tracing and compiling, in fused eager and cold."""
    with tempfile.TemporaryDirectory() as cache:
        figures = child("gpt", "fused", 3, layers, cache)
    return figures["start CPU s"] - WARM_UP * figures["step CPU ms"] / 1e3


def least(rounds: list[Figures]) -> Figures:
    return {
        name: min(r[name] for r in rounds) if isinstance(value, (int, float)) else value
        for name, value in rounds[0].items()
    }


def ratios(model: str, figures: dict[str, Figures]) -> dict[str, tuple[float, str, float]]:
    """Each ratio with its limit: ("≥" or "≤", number)."""

    def times(slower: str, faster: str, name: str = "step CPU ms") -> float:
        return figures[slower][name] / figures[faster][name]

    found = {}
    if {"strict", "fused"} <= figures.keys():
        found["strict / fused"] = times("strict", "fused"), "≥", FUSED_OVER_STRICT
    if {"jax", "fused"} <= figures.keys():
        found["fused / JAX"] = times("fused", "jax"), "≤", FUSED_OVER_JAX
    for mode in figures.keys() & {"strict", "fused", "compiled"}:
        mine = figures[mode]
        found[f"warm / cold, {mode}"] = mine["warm load s"] / max(mine["compile s"], 1e-9), "≤", WARM_OVER_COLD
        found[f"compiled by the second process, {mode}"] = mine["warm compiled"], "≤", 0
        found[f"programs after step {WARM_UP}, {mode}"] = mine["programs after step 3"], "≤", 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*json.loads(options.child))))
        return 0
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    modes = [m for m in options.mode or MODES if m != "jax" or importlib.util.find_spec("jax")]
    failed = False
    everything = {}
    for model in options.model or MODELS:
        mine = [m for m in modes if m != "jax" or model == "gpt"]
        rounds = [{m: run(model, m, options.steps, options.layers) for m in mine} for _ in range(options.rounds)]
        everything[model] = figures = {m: least([r[m] for r in rounds]) for m in mine}
        print_table(model, figures)
        for name, (value, relation, limit) in ratios(model, figures).items():
            kept = value >= limit if relation == "≥" else value <= limit
            failed |= not kept
            print(f"  {name}: {value:.2f} ({relation} {limit}{'' if kept else ', MISSED'})")
    if "gpt" in everything and "fused" in modes and options.layers is None:
        shallow, deep = (min(compile_seconds(n) for _ in range(options.rounds)) for n in DEPTHS)
        kept = deep <= DEEP_OVER_SHALLOW * shallow
        failed |= not kept
        everything["compile CPU s"] = {str(DEPTHS[0]): shallow, str(DEPTHS[1]): deep}
        print(f"compiling a GPT, fused: {shallow:.1f} CPU s with {DEPTHS[0]} layers, {deep:.1f} with {DEPTHS[1]}")
        limit = f"≤ {DEEP_OVER_SHALLOW}{'' if kept else ', MISSED'}"
        print(f"  {DEPTHS[1]} layers / {DEPTHS[0]} layers: {deep / shallow:.2f} ({limit})")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    return int(options.check and failed)


COLUMNS = {
    "step ms": "step ms",
    "step CPU ms": "CPU ms",
    "first s": "first s",
    "first CPU s": "first CPU s",
    "warm first s": "warm first s",
    "warm first CPU s": "warm CPU s",
    "compile s": "compile s",
    "warm load s": "load s",
    "programs": "programs",
    "device MiB": "device MiB",
    "resident MiB": "resident MiB",
}


def print_table(model: str, figures: dict[str, Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(model, *COLUMNS.values())
    for mode, mine in figures.items():
        shown = [mine.get(name) for name in COLUMNS]
        table.add_row(mode, *("" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:,.2f}" for v in shown))
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
