"""How much registering the device adds to `import torch`: medians over fresh interpreters, in milliseconds.

    python benchmarks/import_time.py [RUNS]

Run it on an idle machine. The limit the project holds itself to is 60 ms.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

SCRIPT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import torch_tpu
end = time.perf_counter()
print(middle - start, end - middle)
"""


def measure():
    """Seconds of `import torch` without the package, and of `import torch_tpu` after it."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    printed = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True)
    torch_seconds, added_seconds = map(float, printed.split())
    return torch_seconds, added_seconds


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    measure()
    torch_seconds, added_seconds = zip(*(measure() for _ in range(runs)), strict=True)
    print(f"import torch        {statistics.median(torch_seconds) * 1e3:8.1f} ms")
    print(f"torch_tpu adds      {statistics.median(added_seconds) * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
