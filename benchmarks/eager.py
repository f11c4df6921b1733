"""Cost of one eager operator on small tensors, beside the same operator on the CPU: `python benchmarks/eager.py`.

Prints microseconds per call (median of several rounds, without waiting for results) and the ratio to the same operator
on the CPU in the same run. Then, for an addition and in the time of this thread alone: what recording costs, recording
and a flush whose program is known, and strict eager. `--check` exits with 1 if strict eager costs more than 35 times
the CPU's time for any operator, or the addition more than `LIMITS`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

LIMIT = 35.0
ROUNDS = 7
CALLS = 2000
# What an addition may cost, in additions on the CPU.
LIMITS = {"recording": 4.5, "recording and a known flush": 7.0, "strict eager": 25.0}
# Shorter than what a graph runs by itself.
RECORDED = 100


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call over several rounds."""
    for _ in range(50):
        call()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
        torch.accelerator.synchronize()
    return statistics.median(rounds)


def operators(device: str) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)
    row = torch.randn(8).to(device)
    index = torch.tensor([1, 3, 5]).to(device)
    weight = torch.randn(8, 8).to(device)
    return {
        "add": lambda: x + y,
        "multiply by a number": lambda: x * 2.5,
        "in-place add": lambda: x.add_(y),
        "relu": lambda: torch.relu(x),
        "sum over a dimension": lambda: x.sum(1),
        "matrix product": lambda: x @ y,
        "linear with bias": lambda: torch.nn.functional.linear(x, weight, row),
        "view": lambda: x.view(4, 16),
        "add of two rows (views)": lambda: x[1] + y[2],
        "write into a row": lambda: x[1].copy_(row),
        "index_select": lambda: x.index_select(0, index),
        "cat": lambda: torch.cat([x, y]),
        "softmax": lambda: torch.softmax(x, -1),
    }


def thread_microseconds(call: Callable[[], object], calls: int, after: Callable[[], None], counts_after: bool) -> float:
    """The least time of this thread for one of so many calls, over many rounds; other processes don't count."""
    rounds = []
    for _ in range(max(10, CALLS // calls * 4)):
        began = time.thread_time()
        for _ in range(calls):
            call()
        took = time.thread_time() - began
        after()
        rounds.append((time.thread_time() - began if counts_after else took) / calls * 1e6)
    return min(rounds)


def costs_of_recording() -> dict[str, float]:
    """What an addition costs in each mode, in additions on the CPU."""
    x = torch.randn(8, 8)
    on_device = x.to("tpu")
    last = [on_device]

    def chain() -> None:
        last[0] = last[0] + on_device

    def flush() -> None:
        torch.tpu.synchronize()
        last[0] = on_device

    one = thread_microseconds(lambda: x + x, CALLS, lambda: None, False)
    strict = thread_microseconds(lambda: on_device + on_device, CALLS // 4, torch.tpu.synchronize, False)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        recording = thread_microseconds(lambda: on_device + on_device, RECORDED, torch.tpu.synchronize, False)
        flushed = thread_microseconds(chain, RECORDED, flush, True)
    return dict(zip(LIMITS, (recording / one, flushed / one, strict / one), strict=True))


def main() -> int:
    device, host = operators("tpu"), operators("cpu")
    table = Table("operator on 8×8 float32", "tpu µs", "cpu µs", "ratio")
    ratios = {}
    for name in device:
        on_device, on_host = microseconds(device[name]), microseconds(host[name])
        ratios[name] = on_device / on_host
        table.add_row(name, f"{on_device:.1f}", f"{on_host:.2f}", f"{ratios[name]:.1f}×")
    Console().print(table)
    worst = max(ratios, key=ratios.__getitem__)
    print(f"worst: {worst}, {ratios[worst]:.1f}× (limit {LIMIT:.0f}×); add: {ratios['add']:.1f}×")
    costs = costs_of_recording()
    for name, cost in costs.items():
        print(f"addition, {name}: {cost:.1f}× (limit {LIMITS[name]:.1f}×)")
    passed = ratios[worst] <= LIMIT and all(cost <= LIMITS[name] for name, cost in costs.items())
    return 1 if "--check" in sys.argv and not passed else 0


if __name__ == "__main__":
    sys.exit(main())
