"""torch.compile beside jax.jit in one process: `python benchmarks/compiled.py` (needs JAX: `pip install '.[bench]'`).

- `call`: a function of 200 small arrays that does next to nothing, so that a call is all overhead: a list of tensors, a
  module with 200 parameters, and jax.jit.
- `gpt`, `cnn`: a training step of the GPT (AdamW) and of the residual CNN (momentum) of `training_models.py`, and
  the same step in JAX.
- `depth`: the first step of a GPT of 2 and of 24 equal layers with nothing on disk, each in a process of its own.

Both sides take turns, so whatever else the machine does hits both; the least and the median of the turns are shown.
`call` is processor time of the calling thread, the steps are wall time, `depth` is processor time of the process.

    --only call        only this (may be repeated)
    --check            exits with 1 if a limit below is exceeded
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import training_models
from rich.console import Console
from rich.table import Table
from torch import nn

PARTS = ("call", "gpt", "cnn", "depth")
ARGUMENTS = 200
CALL_OVER_JAX = 2.0
STEP_OVER_JAX = 1.05
DEEP_OVER_SHALLOW = 2.0
TURNS = 15

Times = dict[str, list[float]]


def take_turns(functions: dict[str, Callable[[], object]], calls: int, clock: Callable[[], float]) -> Times:
    """Seconds of a call of each, one figure for each turn."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: Times = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, function in functions.items():
            began = clock()
            for _ in range(calls):
                function()
            times[name].append((clock() - began) / calls)
    return times


def total(arrays):
    result = arrays[0]
    for array in arrays[1:]:
        result = result + array
    return result


class Parameters(nn.Module):
    def __init__(self, arrays):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.from_numpy(a), requires_grad=False) for a in arrays)

    def forward(self):
        return total(list(self.parts))


def call() -> Times:
    import jax

    arrays = [np.full(4, i / 100, np.float32) for i in range(ARGUMENTS)]
    tensors, module = [torch.from_numpy(a).to("tpu") for a in arrays], torch.compile(Parameters(arrays).to("tpu"))
    function, jitted = torch.compile(total), jax.jit(total)
    given = [jax.numpy.asarray(a) for a in arrays]
    np.testing.assert_allclose(function(tensors).cpu().numpy(), np.asarray(jitted(given)), rtol=1e-5)
    return take_turns(
        {"jax": lambda: jitted(given), "list": lambda: function(tensors), "module": module}, 200, time.thread_time
    )


def whole_step(model: str) -> Callable[[], None]:
    """A compiled training step that ends when the parameters are there, not when the loss is: JAX's is one program."""
    step = training_models.step_of(model, "tpu", compiled=True)

    def run() -> None:
        step()
        torch.tpu.synchronize()

    return run


def gpt() -> Times:
    return take_turns({"jax": training_models.jax_step_of(), "compiled": whole_step("gpt")}, 1, time.perf_counter)


def cnn() -> Times:
    return take_turns({"jax": jax_cnn_step(), "compiled": whole_step("cnn")}, 1, time.perf_counter)


def jax_cnn_step() -> Callable[[], float]:
    """The residual CNN's step in JAX: the same parameters, layout and arithmetic, the state donated."""
    import jax
    import jax.numpy as jnp

    torch.manual_seed(0)
    model = training_models.CNN()
    state = {name: jnp.asarray(t.detach().numpy()) for name, t in model.state_dict().items() if t.ndim}
    statistics_of = {name: t for name, t in state.items() if "running" in name}
    weights = {name: t for name, t in state.items() if "running" not in name}

    def conv(x, w, stride):
        pad = w.shape[-1] // 2
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    def loss_of(weights, statistics_of, x, y):
        new = {}

        def norm(x, name):
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
            unbiased = variance * (x.size / x.shape[1]) / (x.size / x.shape[1] - 1)
            for what, value in (("running_mean", mean), ("running_var", unbiased)):
                new[f"{name}.{what}"] = 0.9 * statistics_of[f"{name}.{what}"] + 0.1 * value
            scale = jax.lax.rsqrt(variance + 1e-5) * weights[f"{name}.weight"]
            return x * scale[:, None, None] + (weights[f"{name}.bias"] - mean * scale)[:, None, None]

        hidden = jax.nn.relu(norm(conv(x, weights["stem.0.weight"], 1), "stem.1"))
        for i, block in enumerate(model.blocks):
            name, stride = f"blocks.{i}", block.conv_1.stride[0]
            inside = jax.nn.relu(norm(conv(hidden, weights[f"{name}.conv_1.weight"], stride), f"{name}.norm_1"))
            inside = norm(conv(inside, weights[f"{name}.conv_2.weight"], 1), f"{name}.norm_2")
            if f"{name}.shortcut.0.weight" in weights:
                hidden = norm(conv(hidden, weights[f"{name}.shortcut.0.weight"], stride), f"{name}.shortcut.1")
            hidden = jax.nn.relu(inside + hidden)
        logits = hidden.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1).mean(), new

    def update(weights, momentum, statistics_of, x, y):
        (loss, new), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights, statistics_of, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return loss, jax.tree.map(lambda w, m: w - 0.05 * m, weights, momentum), momentum, new

    x, y = (jnp.asarray(t.numpy()) for t in training_models.images())
    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    carried = [weights, jax.tree.map(jnp.zeros_like, weights), statistics_of]

    def step() -> float:
        loss, *carried[:] = jitted(*carried, x, y)
        return float(loss)

    return step


def depth() -> Times:
    return {f"{layers} layers": [first_step(layers) for _ in range(2)] for layers in (2, 24)}


def first_step(layers: int) -> float:
    """Processor seconds of the first step in a new process: everything that happens once."""
    code = (
        "import time, torch, training_models\n"
        f"step = training_models.step_of('gpt', 'tpu', {layers}, True)\n"
        "began = time.process_time(); step(); print(time.process_time() - began)"
    )
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCH_TPU_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=sys.path[0], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _shown(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    limits = {
        ("call", "list"): CALL_OVER_JAX,
        ("call", "module"): CALL_OVER_JAX,
        ("gpt", "compiled"): STEP_OVER_JAX,
        ("cnn", "compiled"): STEP_OVER_JAX,
        ("depth", "24 layers"): DEEP_OVER_SHALLOW,
    }
    table = Table("", "", "least", "median", "least over the first", "limit")
    exceeded = False
    for part in options.only or PARTS:
        times = globals()[part]()
        first = min(next(iter(times.values())))
        for name, found in times.items():
            limit, ratio = limits.get((part, name)), min(found) / first
            exceeded |= limit is not None and ratio > limit
            shown = (_shown(min(found)), _shown(statistics.median(found)))
            table.add_row(part, name, *shown, f"{ratio:.2f}×", "" if limit is None else f"{limit:.2f}×")
    Console().print(table)
    return 1 if options.check and exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
