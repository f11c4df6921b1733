"""Peak memory of a training step in fused eager, beside what CPU PyTorch allocates: `python benchmarks/memory.py`.

The CPU's is the sum of all allocations and releases that PyTorch's profiler sees; the device's counts live values, what
a pending graph holds, and results and temporaries of each program as XLA states them. `--check` exits with 1 if a model
needs more than 1.1 times the CPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from training_models import step_of

LIMIT = 1.1
MEASURED = "measured step"
# Does one training step; made for a device.
Step = Callable[[], object]


def peak_on_cpu(make: Callable[[str], Step]) -> int:
    """Bytes that PyTorch holds at most during the third step of a loop, weights and optimizer states included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make("cpu")
        step()
        step()
        with record_function(MEASURED):
            step()
    events = profiler.profiler.kineto_results.events()
    began = min(event.start_ns() for event in events if event.name() == MEASURED)
    held = most = 0
    for time, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += nbytes
        if time >= began:
            most = max(most, held)
    return most


def peak_on_device(make: Callable[[str], Step]) -> int:
    """The same on the device, in fused mode; of the fourth step, since the third may still compile something."""
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        step = make("tpu")
        for _ in range(3):
            step()
        torch.tpu.reset_peak_memory_stats()
        step()
        torch.tpu.synchronize()
        return torch.tpu.max_memory_allocated()


def main() -> int:
    table = Table("training step", "tpu MB", "cpu MB", "ratio")
    ratios = {}
    for name in ("gpt", "cnn", "lstm"):
        make = partial(step_of, name)
        on_device, on_cpu = peak_on_device(make), peak_on_cpu(make)
        ratios[name] = on_device / on_cpu
        table.add_row(name, f"{on_device / 1e6:.1f}", f"{on_cpu / 1e6:.1f}", f"{ratios[name]:.2f}×")
    Console().print(table)
    return 1 if "--check" in sys.argv and max(ratios.values()) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
