"""What `import torch` and `import torch_tpu` do to a process."""

from __future__ import annotations

LOADED = "import sys; print([name for name in ('jaxlib', 'torch._dynamo') if name in sys.modules])"


def test_loading_imports_neither_the_runtime_nor_dynamo(run_python):
    assert run_python(f"import torch, torch_tpu; torch.device('tpu'); {LOADED}").strip() == "[]"


def test_asking_about_the_device_imports_no_runtime(run_python):
    script = "import torch, torch_tpu; torch.manual_seed(1); assert torch.tpu.is_available(); torch.tpu.synchronize();"
    assert run_python(script + LOADED).strip() == "[]"


def test_importing_the_package_registers_without_autoload(run_python):
    script = "import torch; assert not hasattr(torch, 'tpu'); import torch_tpu; print(torch.device('tpu'))"
    assert run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0").strip() == "tpu"


def test_importing_the_package_first(run_python):
    assert run_python("import torch_tpu, torch; print(torch.accelerator.current_accelerator())").strip() == "tpu"


def test_torch_tpu_is_importable_as_a_module(run_python):
    script = """
import torch_tpu
import torch.tpu, torch.tpu.memory
from torch.tpu import Stream
import torch.tpu.random as random
print(torch.tpu.__name__, random.__name__)
"""
    assert run_python(script).strip() == "torch.tpu torch.tpu.random"


FAILING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_tpu.device.patches":
            raise ImportError("no patches today")
sys.meta_path.insert(0, Refuse())
import torch, torch_tpu
assert not torch.tpu.is_available()
assert torch.ones(2).sum() == 2
torch.manual_seed(0)
for use in (lambda: torch.tpu.synchronize(), lambda: torch.ones(2, device="tpu"), lambda: torch.ones(2).to("tpu")):
    try:
        use()
    except (AttributeError, RuntimeError) as error:
        print(error)
"""


def test_a_failure_to_register_is_raised_at_the_first_use(run_python):
    lines = run_python(FAILING).splitlines()
    assert len(lines) == 3
    assert set(lines) == {"The device 'tpu' could not be registered with PyTorch: ImportError: no patches today"}


def test_a_second_backend_is_refused(run_python):
    script = """
import torch
torch.utils.rename_privateuse1_backend("npu")
import torch_tpu, torch_tpu._loader
print(torch_tpu._loader.failure())
"""
    assert "'npu' is already registered" in run_python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_unknown_attributes(run_python):
    script = """
import torch, torch_tpu
for owner in (torch_tpu, torch.tpu):
    try:
        owner.nonexistent
    except AttributeError as error:
        print(error)
"""
    assert len(run_python(script).splitlines()) == 2
