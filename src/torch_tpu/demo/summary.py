"""What the demo ran, and where."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from torch_tpu import metrics
from torch_tpu.runtime.process_client import client


def run(console: Console, seconds: float) -> bool:
    """Prints the platform and the counters; whether nothing fell back to the CPU."""
    counters = metrics.counters()
    fallbacks = {k.removeprefix("fallback::"): v for k, v in counters.items() if k.startswith("fallback::")}
    compiling = counters.get("compile_seconds", 0.0)
    table = Table(show_header=False)
    table.add_row("platform", f"PJRT {client().platform_name}, as {torch.tpu.get_device_name()}")  # type: ignore[attr-defined]
    table.add_row("programs compiled", f"{counters.get('compile', 0):,}")
    table.add_row("programs run on the device", f"{counters.get('execute', 0):,}")
    table.add_row("operators run by CPU fallback", "none" if not fallbacks else str(fallbacks))
    table.add_row("time compiling", f"{compiling:.1f} s")
    table.add_row("time in all", f"{seconds:.1f} s")
    table.add_row("peak device memory", f"{torch.accelerator.max_memory_allocated() / 2**20:,.1f} MiB")
    console.print(table)
    return not fallbacks
