"""What fusing could gain at most: `python benchmarks/fusion_bound.py [--model gpt] [--steps 6]`.

Times every operator of strict eager's training steps alone, until its result is there, and takes the matrix products,
convolutions, attention and recurrent layers apart: fused eager launches the same kernels for them. If everything else
cost nothing, a step would take their time; strict eager's step over that is a bound of strict over fused. Processor
time of all threads, as the least of the steps, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from training_models import step_of

import torch_tpu  # noqa: F401

_ATTENTION = "_scaled_dot_product_fused_attention_overrideable"
KERNELS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "linear_backward", "convolution_overrideable"),
        *("convolution", "convolution_backward", "convolution_backward_overrideable", "lstm", "rnn_layer"),
        *("rnn_layer_backward", _ATTENTION, _ATTENTION + "_backward"),
    }
)


class Timed(TorchDispatchMode):
    """Adds up the processor seconds of each operator, by its name without the overload."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.process_time()
        result = func(*args, **(kwargs or {}))
        torch.tpu.synchronize()
        self.seconds[func.overloadpacket.__name__] += time.process_time() - began
        return result


def least(step: Any, steps: int) -> float:
    found = []
    for _ in range(steps):
        began = time.process_time()
        step()
        found.append(time.process_time() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=("gpt", "cnn", "lstm"))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    table = Table("model", "step, CPU ms", "kernels, CPU ms", "strict / fused, at most", "most of the rest, CPU ms")
    for model in options.model or ("gpt", "cnn", "lstm"):
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER):
            step = step_of(model, "tpu")
            least(step, 3)
            whole = least(step, options.steps)
            runs = []
            for _ in range(options.steps):
                with Timed() as timed:
                    step()
                runs.append(timed.seconds)
        names = set().union(*runs)
        seconds = {name: min(run[name] for run in runs) for name in names}
        kernels = sum(value for name, value in seconds.items() if name in KERNELS)
        others = sorted((n for n in names if n not in KERNELS), key=seconds.__getitem__, reverse=True)[:6]
        table.add_row(
            model,
            f"{1e3 * whole:.1f}",
            f"{1e3 * kernels:.1f}",
            f"{whole / kernels:.2f}",
            "\n".join(f"{name} {1e3 * seconds[name]:.1f}" for name in others),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
