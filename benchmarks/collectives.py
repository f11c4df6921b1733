"""Collectives of the device beside gloo's of CPU tensors, in one run: `python benchmarks/collectives.py`.

It starts two processes and prints microseconds (median over calls, each waited for) and the ratio to the same
collective of CPU tensors by gloo; "in a graph" is a compiled graph with nothing but the collective in it. `--check`
exits with 1 where an eager ratio is above its limit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from rich.console import Console
from rich.table import Table

SIZES = {"16 B": 4, "4 KiB": 2**10, "1 MiB": 2**18, "16 MiB": 2**22}
CALLS = {"16 B": 200, "4 KiB": 200, "1 MiB": 60, "16 MiB": 15}
LIMITS = {"16 B": 1.2, "4 KiB": 1.2, "1 MiB": 1.2, "16 MiB": 1.5}
LIMIT_OF_GATHERS = 1.0  # of 16 MiB


def microseconds(calls: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Median times of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(count + 3):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            if n >= 3:
                times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def collectives(device: str, n: int) -> dict[str, Callable[[], object]]:
    x = torch.ones(n, device=device)
    rows, part = torch.empty(2 * n, device=device), torch.empty(n // 2, device=device)

    def waited(call: Callable[[], object], result: torch.Tensor) -> Callable[[], object]:
        def run() -> None:
            call()
            if device == "tpu":
                value = result.untyped_storage().value  # type: ignore[attr-defined]
                value.array.block_until_ready()

        return run

    return {
        "all_reduce": waited(lambda: dist.all_reduce(x, dist.ReduceOp.MAX), x),
        "all_gather": waited(lambda: dist.all_gather_single(rows, x), rows),
        "reduce_scatter": waited(lambda: dist.reduce_scatter_single(part, x), part),
    }


def in_graph(n: int) -> Callable[[], object]:
    x = torch.ones(n, device="tpu")
    compiled = torch.compile(lambda t: fc.all_reduce(t, "max", dist.group.WORLD))

    def run() -> None:
        compiled(x).untyped_storage().value.array.block_until_ready()

    return run


def main() -> int:
    dist.init_process_group("tpu_dist")
    torch.set_num_threads(1)
    table = Table("collective", "size", "gloo, CPU tensors", "eager", "ratio", "in a graph", "ratio")
    exceeded = 0
    for size, n in SIZES.items():
        on_cpu, on_device = collectives("cpu", n), collectives("tpu", n)
        for name in on_cpu:
            calls = {"cpu": on_cpu[name], "eager": on_device[name]}
            if name == "all_reduce":
                calls["graph"] = in_graph(n)
            found = microseconds(calls, CALLS[size])
            ratio = found["eager"] / found["cpu"]
            limit = LIMIT_OF_GATHERS if size == "16 MiB" and name != "all_reduce" else LIMITS[size]
            exceeded += ratio > limit
            graph = (
                (f"{found['graph']:,.0f} µs", f"{found['graph'] / found['cpu']:.2f}") if "graph" in found else ("", "")
            )
            table.add_row(name, size, f"{found['cpu']:,.0f} µs", f"{found['eager']:,.0f} µs", f"{ratio:.2f}", *graph)
    if dist.get_rank() == 0:
        Console(width=110).print(table)
    dist.destroy_process_group()
    return int("--check" in sys.argv and exceeded > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(main())
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *sys.argv]
    sys.exit(subprocess.run(run, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
