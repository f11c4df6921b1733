"""What the device adds to `import torch`, and to the first result, in milliseconds.

    python benchmarks/import_time.py [RUNS] [--check]

Each figure is the median over fresh interpreters, one after the other, with all programs on disk. The project holds
itself to 60 ms for registering the device, and to 0.4 of `import torch`'s own time for the first result: registering,
starting PJRT, and `torch.ones(2, device="tpu").sum().item()`. With `--check` more than that is an error. Both halves of
the second figure come from the same processes, so what else the machine does changes it little. Processor time is shown
beside it: on a busy machine it is the better measure.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

LIMIT = 0.4
SCRIPT = """
import time
def now(): return time.perf_counter(), time.process_time()
began = now()
import torch
imported = now()
import torch_tpu
registered = now()
assert torch.ones(2, device="tpu").sum().item() == 2
done = now()
for a, b in ((began, imported), (imported, registered), (imported, done)):
    print(b[0] - a[0], b[1] - a[1])
"""


def measure(cache: str) -> list[tuple[float, float]]:
    """Seconds, by the clock and of the processor: `import torch` alone, what registering adds, what a result adds."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_TPU_CACHE_DIR": cache}
    printed = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True)
    return [(float(clock), float(processor)) for clock, processor in map(str.split, printed.splitlines())]


def main() -> int:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()]
    with tempfile.TemporaryDirectory() as cache:
        measure(cache)
        found = [measure(cache) for _ in range(numbers[0] if numbers else 11)]
    names = ("import torch", "torch_tpu adds", "first result adds")
    medians = [[statistics.median(run[k][kind] for run in found) for kind in (0, 1)] for k in range(3)]
    for name, (clock, processor) in zip(names, medians, strict=True):
        print(f"{name:18} {clock * 1e3:8.1f} ms, {processor * 1e3:8.1f} ms of the processor")
    ratio, of_processor = (statistics.median(run[2][kind] / run[0][kind] for run in found) for kind in (0, 1))
    print(f"first result / import torch: {ratio:.2f} ({of_processor:.2f} of processor time); at most {LIMIT}")
    return 1 if "--check" in sys.argv and min(ratio, of_processor) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
