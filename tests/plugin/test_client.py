"""What the client of a PJRT plug-in does in another way than that of XLA:CPU inside jaxlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tools import platforms
from tools.compare import assert_same, to_device
from torch_tpu import compile as tpu_compile
from torch_tpu import metrics
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import value_of

EVERY_DTYPE = sorted(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
        *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    },
    key=str,
)


def test_its_compiler_is_xla_for_the_cpu_and_nothing_else_is_taken_for_granted() -> None:
    assert client().platform_name == "cpu"
    assert client().runs_on_cpu
    assert not client().is_host_memory
    assert not client().calls_lapack
    described = torch.tpu.get_device_properties()
    assert described.platform == platforms.PLUGIN
    free, total = torch.tpu.mem_get_info()
    assert free <= total == described.total_memory


def test_one_of_its_devices_is_used() -> None:
    # This plug-in has four, whatever it is asked for.
    assert client().device_count >= 1
    assert torch.tpu.device_count() == 1
    with pytest.raises(RuntimeError, match="this process has one tpu device"):
        torch.ones(1, device="tpu:1")


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_contents_of_every_dtype_travel_both_ways(dtype: torch.dtype) -> None:
    bits = torch.arange(24, dtype=torch.uint8)
    values = bits.view(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else bits.to(dtype)
    for x in (values, values[3], values[:0], values.view(4, 6).t()):
        got = x.to("tpu")
        assert got.stride() == x.stride()
        for _ in range(2):  # the second time the buffer knows its contents
            back = got.cpu()
            assert back.dtype is x.dtype
            assert torch.equal(back.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))


def test_what_was_read_stays_as_it_was() -> None:
    x = torch.arange(1000.0).to("tpu")
    torch.tpu.synchronize()
    read = client().get(value_of(x.untyped_storage()).array)
    for _ in range(3):
        x.add_(1)  # would take the buffer's memory if nobody held it
    assert read.tolist() == list(range(1000))
    assert x.tolist() == list(range(3, 1003))


def test_a_host_tensor_may_change_once_it_was_copied() -> None:
    host = torch.arange(300_000.0)
    copies = []
    for n in range(4):
        copies.append(host.to("tpu"))
        host.fill_(-n)
    assert [c[-1].item() for c in copies] == [299_999.0, 0.0, -1.0, -2.0]


def positive(n: int) -> torch.Tensor:
    a = torch.randn(n, n)
    return a @ a.mT + n * torch.eye(n)


def test_factorisations_are_those_of_its_compiler() -> None:
    a, b = positive(5), torch.randn(5, 3)
    before = metrics.counters()
    assert_same(torch.linalg.cholesky(a.to("tpu")), torch.linalg.cholesky(a), strides=False, rtol=1e-5, atol=1e-5)
    assert_same(torch.linalg.eigvalsh(a.to("tpu")), torch.linalg.eigvalsh(a), strides=False, rtol=1e-5, atol=1e-5)
    triangle = a.triu()
    got = torch.linalg.solve_triangular(*to_device((triangle, b)), upper=True)
    assert_same(got, torch.linalg.solve_triangular(triangle, b, upper=True), strides=False, rtol=1e-5, atol=1e-5)
    q, r = torch.linalg.qr(b.to("tpu"))
    torch.testing.assert_close((q @ r).cpu(), b, rtol=1e-5, atol=1e-5)
    assert {k for k in metrics.counters().keys() - before.keys() if k.startswith("fallback")} == set()
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(-a.to("tpu"))


@pytest.mark.parametrize("mode", [torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE], ids=str)
def test_what_its_compiler_has_no_form_for_runs_on_the_host(
    mode: torch.tpu.EagerMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    with torch.tpu.set_eager_mode(mode):
        for _ in range(2):
            a, b = positive(4), torch.randn(4, 2)
            got = torch.linalg.solve(a.to("tpu") * 1, b.to("tpu") * 1) + 1
            torch.testing.assert_close(got.cpu(), torch.linalg.solve(a, b) + 1, rtol=1e-4, atol=1e-5)
    assert metrics.counters()["fallback::aten::_linalg_solve_ex"] == 2


def test_programs_say_their_memory_though_not_their_cost() -> None:
    shown = tpu_compile.debug(lambda x: x @ x, torch.ones(8, 8, device="tpu"))
    assert shown.memory["argument"] == shown.memory["output"] == 4 * 64
    assert "the plug-in reports no cost" in str(shown)
    assert shown.cost["flops"] != shown.cost["flops"]  # NaN, not 0


PROGRAM = """
import json, torch, torch_tpu
from torch_tpu import metrics
x = torch.arange(6.0).reshape(2, 3).to("tpu")
f = torch.compile(lambda x: (x @ x.T + 1).softmax(0).sum())
values = [(x @ x.T).tolist(), f(x).item(), torch.linalg.cholesky(x @ x.T + torch.eye(2, device="tpu")).tolist()]
print(json.dumps([values, metrics.counters()]))
"""


def test_its_executables_are_kept_apart_from_jaxlibs(tmp_path) -> None:
    """In one folder: jaxlib's XLA:CPU fills it, the plug-in finds nothing of it, and the second time all of its own."""

    def run(platform: str) -> tuple[object, dict[str, float], str]:
        environment = {"TORCH_TPU_CACHE_DIR": str(tmp_path), "TORCH_TPU_PLATFORM": platform}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        values, counters = json.loads(done.stdout)
        return values, counters, done.stderr

    plugin = os.environ["TORCH_TPU_PLATFORM"]
    _, of_jaxlib, _ = run("cpu")
    values, cold, _ = run(plugin)
    assert values[0] == [[5.0, 14.0], [14.0, 50.0]]
    assert cold["compile"] >= 4
    assert "disk_cache_hit" not in cold
    again, warm, said = run(plugin)
    assert again == values
    assert "compile" not in warm
    assert warm["disk_cache_hit"] >= cold["compile"]
    assert of_jaxlib["compile"] >= 4
    # The plug-in's log has kilobytes for each executable it loads.
    assert "cpu_aot_loader" not in said
