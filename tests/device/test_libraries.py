"""Libraries that know a fixed list of devices."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def file(tmp_path):
    torch_file = pytest.importorskip("safetensors.torch")
    torch_file.save_file({"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)}, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.mark.parametrize("device", ["tpu", "tpu:0", torch.device("tpu")])
def test_safetensors_load_onto_the_device(file, device):
    from safetensors.torch import load_file

    loaded = load_file(file, device=device)
    assert loaded["x"].device == torch.device("tpu:0")
    assert torch.equal(loaded["x"].cpu(), torch.arange(6.0).reshape(2, 3))


def test_safetensors_read_by_part(file):
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="tpu") as opened:
        assert set(opened.keys()) == {"x", "y"}
        assert opened.get_tensor("y").is_tpu
        part = opened.get_slice("x")
        assert part.get_shape() == [2, 3]
        assert part[:, 1:].is_tpu
        assert part[:, 1:].tolist() == [[1, 2], [4, 5]]


def test_safetensors_for_other_devices_are_as_before(file):
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        assert type(opened).__module__ != "torch_tpu.device.libraries"
        assert opened.get_tensor("y").device.type == "cpu"
    with pytest.raises(Exception, match="banana"):
        safe_open(file, framework="pt", device="banana")


def test_safetensors_of_device_tensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    x = torch.arange(6.0).reshape(2, 3)
    save_file({"x": x.to("tpu"), "y": x.to("tpu", torch.bfloat16)}, tmp_path / "file.safetensors")
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "file.safetensors")
    assert torch.equal(loaded["x"], x)
    assert torch.equal(loaded["y"], x.bfloat16())


def test_accelerate_takes_the_device(run_python):
    pytest.importorskip("accelerate")
    script = """
import torch, torch_tpu
from accelerate import Accelerator
from accelerate.utils import get_max_memory
accelerator = Accelerator(mixed_precision="bf16")
model = accelerator.prepare(torch.nn.Linear(2, 2))
with accelerator.autocast():
    output = model(torch.ones(1, 2, device=accelerator.device))
print(accelerator.device.type, model.weight.device.type, sorted(map(str, get_max_memory())), output.dtype)
"""
    assert run_python(script).strip() == "tpu tpu ['0', 'cpu'] torch.float32"


def test_accelerate_on_the_cpu(run_python):
    pytest.importorskip("accelerate")
    script = "import torch_tpu; from accelerate import Accelerator; print(Accelerator(cpu=True).device)"
    assert run_python(script).strip() == "cpu"


def test_an_import_hook_runs_at_every_import_and_not_for_a_look_up(run_python):
    script = """
import importlib, importlib.util, sys
import torch, torch_tpu
from torch_tpu.patching.post_import import after_import
seen = []
after_import("wave", lambda module: seen.append(module.Wave_read.__name__))
importlib.util.find_spec("wave")
assert seen == []
import wave
assert type(wave.__spec__.loader).__name__ == "SourceFileLoader"
importlib.reload(wave)
after_import("wave", lambda module: seen.append("now"))
print(seen)
"""
    assert run_python(script).strip() == "['Wave_read', 'Wave_read', 'now']"


def test_compiled_functions_do_not_trace_the_package(run_python):
    script = """
import sys, torch, torch_tpu
assert "torch._dynamo" not in sys.modules
function = torch.compile(lambda x: (x * 2).sum(), backend="eager", fullgraph=True)
print(function(torch.ones(3, device="tpu")).item())
from torch._dynamo import trace_rules
from torch_tpu.device import streams
print(trace_rules.check_file(streams.__file__).skipped)
"""
    assert run_python(script).split() == ["6.0", "True"]
