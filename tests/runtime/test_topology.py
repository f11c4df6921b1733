"""Ahead-of-time targets (no TPU attached): tensors without values, the compiler's answer, what is kept on disk."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from torch_tpu import cli
from torch_tpu.runtime.generations import GENERATIONS, GIB
from torch_tpu.runtime.platform import PlatformError, choose

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

PROGRAM = """
import json, torch
from torch_tpu import metrics
from torch_tpu.runtime.client import NoContents
from torch_tpu.runtime.process_client import client

linear = torch.nn.Linear(256, 512, device="tpu", dtype=torch.bfloat16)
x = torch.randn(64, 256, device="tpu", dtype=torch.bfloat16)
metrics.reset()
torch.tpu.synchronize()
programs = list(client()._executables.values())
loss = linear(x).float().sum()
loss.backward()
torch.tpu.synchronize()
last = [p.analysis() for p in client()._executables.values() if p not in programs]
try:
    loss.item()
    said = ""
except NoContents as error:
    said = str(error)
step = max(last, key=lambda a: a.flops)
print(json.dumps({
    "name": torch.tpu.get_device_name(), "memory": torch.tpu.get_device_properties().total_memory,
    "grad": list(linear.weight.grad.shape), "said": said, "compiles": metrics.counters().get("compile", 0),
    "flops": step.flops, "arguments": step.argument_bytes, "line": "program.py:12/" in step.hlo,
}))
"""


def run(tmp_path, platform):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "TORCH_TPU_PLATFORM": platform, "TORCH_TPU_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing of what libtpu writes about the TPU it did not find
    return json.loads(done.stdout)


@needs_libtpu
def test_a_program_compiles_for_a_tpu_that_is_not_there(tmp_path):
    first = run(tmp_path, "tpu7x:2x2x1")
    assert (first["name"], first["memory"]) == ("TPU v7", 96 * GIB)
    assert first["grad"] == [512, 256]
    # x @ w.T and the gradient of w; the bias, the conversion and the sum add less than one operation in a hundred.
    products = 2 * 2 * 64 * 256 * 512
    assert products <= first["flops"] < 1.02 * products
    assert first["arguments"] >= (64 * 256 + 512 * 256 + 512) * 2
    assert first["line"]
    assert "no values to read" in first["said"]
    assert f"{tmp_path / 'program.py'}:" in first["said"]
    assert first["compiles"] > 0
    assert run(tmp_path, "tpu7x:2x2x1") == {**first, "compiles": 0}


def listed(*options):
    done = CliRunner().invoke(cli.app, ["topologies", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    return {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:]}


@needs_libtpu
def test_the_slices_that_one_can_rent_are_listed():
    rows = listed()
    flat = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
    for name in ("v5e", "v6e"):
        assert [row.partition(":")[2] for row in rows if row.startswith(f"{name}:")] == flat
    for name in ("v5p", "tpu7x"):
        shapes = [row.partition(":")[2] for row in rows if row.startswith(f"{name}:")]
        assert shapes[:5] == ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"]
        assert shapes[-1] == "16x16x24"
    assert rows["tpu7x:8x8x8"][3:5] == ["512", "1,024"]
    assert rows["v5p:2x2x1"][3:7] == ["4", "4", "95", "GiB"]


@needs_libtpu
def test_all_shapes_that_the_compiler_accepts_are_listed_when_asked_for():
    rented, every = listed(), listed("--all")
    assert {name: [*row, "yes"] for name, row in rented.items()} == {n: r for n, r in every.items() if r[-1] == "yes"}
    others = {name for name, row in every.items() if row[-1] == "no"}
    assert {"v5e:1x1024", "v5p:1x1x1", "v6e:1x2"} <= others
    assert len(every) == len(rented) + len(others)


def test_slices_have_the_dimensions_of_their_torus():
    for generation in GENERATIONS:
        assert all(len(shape.split("x")) == generation.dimensions for shape in generation.slices)
        assert bool(generation.slices) == bool(generation.topology)


@pytest.mark.parametrize("wanted", ["v5e:", "v5e:2", "v5e:2x2x1", "v5e:0x2", "tpu7x:2x2", "v6e:ax2"])
def test_a_topology_that_can_not_be_is_refused(wanted):
    with pytest.raises(PlatformError, match=r"torus, so write \w+:2x2"):
        choose({"TORCH_TPU_PLATFORM": wanted})


def test_a_topology_needs_libtpu(monkeypatch):
    monkeypatch.setattr("torch_tpu.runtime.platform.find_libtpu", lambda environ: None)
    with pytest.raises(PlatformError, match=r"pip install 'torch-tpu\[tpu\]'"):
        choose({"TORCH_TPU_PLATFORM": "v5e:2x2"})


def test_the_figures_of_a_chip_are_shared_by_its_devices():
    v7 = next(g for g in GENERATIONS if g.topology == "tpu7x")
    assert (v7.hbm_bytes_per_device, v7.bf16_flops_per_device) == (96 * GIB, 1153.5e12)
