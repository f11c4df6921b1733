"""What a process loads for its first result when its programs are on disk: nothing that only tracing needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What takes long to import: PyTorch's symbolic shapes, MLIR, the tracer, every family of lowerings.
TRACING = """
import sys
from torch_tpu.ops.core import families
tracing = {"sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "jax", "jaxlib.mlir", "filelock"}
tracing |= {f"torch_tpu.{name}" for name in ("hlo.array", "hlo.module", "hlo.structured", "ops.tracing.tracer")}
tracing |= {f"torch_tpu.ops.{family}" for family in families.FAMILIES}
loaded = sorted(tracing & set(sys.modules))
"""
FIRST = (
    """
import torch, torch_tpu
assert torch.ones(2, device="tpu").sum().item() == 2
"""
    + TRACING
    + """
print(loaded, torch_tpu.metrics.counters().get("compile", 0), torch_tpu.metrics.counters().get("trace_seconds", 0))
"""
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A disk cache with the table of kernels and the programs of the first result."""
    folder = str(tmp_path_factory.mktemp("cache"))
    environment = os.environ | {"TORCH_TPU_CACHE_DIR": folder}
    cold = subprocess.run(
        [sys.executable, "-c", FIRST], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    assert "'sympy'" in cold.stdout
    assert "torch_tpu.ops.reduction" in cold.stdout
    return folder


def test_the_first_result_from_a_warm_cache_loads_no_tracer(run_python, cache: str):
    assert run_python(FIRST, TORCH_TPU_CACHE_DIR=cache).strip() == "[] 0 0"


def test_a_first_program_loads_the_families_it_needs(run_python, cache: str):
    """The table of kernels is on disk, the program is not."""
    script = 'import torch, torch_tpu\nassert torch.ones(3, 5, device="tpu").sin().sum().item() > 12' + TRACING
    found = run_python(script + "print(*loaded)", TORCH_TPU_CACHE_DIR=cache).split()
    assert {"torch_tpu.ops.tracing.tracer", "torch_tpu.ops.transcendental", "torch_tpu.ops.reduction"} <= set(found)
    assert not {"torch_tpu.ops.attention", "torch_tpu.ops.optimizer", "torch_tpu.ops.special"} & set(found)


OTHER_CALLS = """
import torch, torch_tpu
host = torch.arange(24.0).reshape(4, 6)
x = host.to("tpu")
for _ in range(2):  # with other data and offsets, new and then known
    for begin in range(3):
        for function in (lambda t: t.sum(), lambda t: t + begin, lambda t: t * t, lambda t: torch.softmax(t, -1)):
            assert torch.allclose(function(x[begin:, begin:]).cpu(), function(host[begin:, begin:])), begin
    host, x = host + 1, x + 1
    written, on_host = x.clone(), host.clone()
    written[1:3].mul_(begin + 2)
    on_host[1:3].mul_(begin + 2)
    assert torch.equal(written.cpu(), on_host)
print(torch_tpu.metrics.counters().get("trace_seconds", 0))
"""


def test_later_calls_from_a_warm_cache(run_python, cache: str):
    run_python(OTHER_CALLS, TORCH_TPU_CACHE_DIR=cache)
    assert run_python(OTHER_CALLS, TORCH_TPU_CACHE_DIR=cache).strip() == "0"


THREADS = """
import threading, torch, torch_tpu
size, failures = {size}, []
host = torch.rand(size, size) + 0.5
x = host.to("tpu")
functions = [torch.sin, torch.sort, torch.cumsum, torch.nn.functional.softplus, torch.tril, torch.linalg.vector_norm]
functions = [f if f not in (torch.cumsum,) else (lambda t: torch.cumsum(t, 0)) for f in functions]
start = threading.Barrier(12)

def run(function):
    start.wait()
    try:
        got, expected = function(x), function(host)
        got, expected = (r[0] if isinstance(r, tuple) else r for r in (got, expected))
        torch.testing.assert_close(got.cpu(), expected)
    except BaseException as error:
        failures.append(f"{{function}}: {{error!r}}")

threads = [threading.Thread(target=run, args=(f,)) for f in functions * 2]
for t in threads: t.start()
for t in threads: t.join()
print(failures)
"""


def test_threads_that_need_the_same_families_at_once(run_python, cache: str):
    """Their first calls find, load and register everything together: from the table, and without one."""
    assert run_python(THREADS.format(size=17), TORCH_TPU_CACHE_DIR=cache).strip() == "[]"
    assert run_python(THREADS.format(size=19), TORCH_TPU_CACHE_DIR="").strip() == "[]"


FAULTY = """
import sys, torch, torch_tpu
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_tpu.ops.sorting":
            raise ImportError("no sorting today")
sys.meta_path.insert(0, Refuse())
x = torch.tensor([[2.0, 1.0, 3.0]], device="tpu")
assert (x + 1).tolist() == [[3.0, 2.0, 4.0]]
for _ in range(2):
    try:
        torch.sort(x)
    except ImportError as error:
        print(error)
sys.meta_path.pop(0)
assert torch.sort(x)[0].tolist() == [[1.0, 2.0, 3.0]]
"""


def test_a_family_that_can_not_be_loaded_says_so_at_each_call(run_python, cache: str):
    assert run_python(FAULTY, TORCH_TPU_CACHE_DIR=cache).splitlines() == ["no sorting today"] * 2


DAMAGED = """
import warnings, torch, torch_tpu
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert torch.ones(2, device="tpu").sum().item() == 2
print(*(str(w.message) for w in caught), sep="\\n")
"""


@pytest.mark.parametrize("content", [b"{}", b'{"rows":{"aten::sin":["other","",false,"1",false,false]},"families":{}}'])
def test_a_table_that_is_none_is_made_again(run_python, tmp_path: Path, content: bytes):
    run_python(
        f"""
import torch, torch_tpu
from torch_tpu.eager import overload_table
from torch_tpu.runtime import disk_cache
disk_cache.from_environment().write(overload_table._key(overload_table._names()), {content!r})
""",
        TORCH_TPU_CACHE_DIR=str(tmp_path),
    )
    assert "is no table of kernels" in run_python(DAMAGED, TORCH_TPU_CACHE_DIR=str(tmp_path))
    assert run_python(DAMAGED, TORCH_TPU_CACHE_DIR=str(tmp_path)).strip() == ""
