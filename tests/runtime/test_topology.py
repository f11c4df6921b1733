"""Compiling for TPUs that are not there: shapes without contents, the compiler's answer, what is kept on disk."""

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
    "flops": step.flops, "arguments": step.argument_bytes, "line": "program.py:11/" in step.hlo,
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
    assert "have no contents" in first["said"]
    assert f"{tmp_path / 'program.py'}:" in first["said"]
    assert first["compiles"] > 0
    assert run(tmp_path, "tpu7x:2x2x1") == {**first, "compiles": 0}


@needs_libtpu
def test_the_topologies_are_listed():
    listed = CliRunner().invoke(cli.app, ["topologies"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    rows = {line.split()[0]: line.split() for line in listed.stdout.splitlines()[1:]}
    for name in ("v5e:1x1", "v5e:16x16", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1", "tpu7x:8x8x8"):
        assert name in rows
    assert rows["tpu7x:8x8x8"][3:5] == ["512", "1,024"]
    assert rows["v5p:2x2x1"][3:7] == ["4", "4", "95", "GiB"]


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
