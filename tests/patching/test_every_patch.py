"""Each patch where an object that it relies on is missing: what the CPU, the device and the user see of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_tpu import patch_report
from torch_tpu.patching import versions

PATCHES = patch_report.patches()
NAMES = [patch.name for patch in PATCHES]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What `forked` found, by case."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}
    # Every case imports the same files; without bytecode that is half of the time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(
        [sys.executable, "-m", "tests.patching.forked"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def answer(outcomes, case):
    """A case that the CPU's work survived without a word about patches."""
    found = outcomes["answers"][case]
    assert "crash" not in found, found["crash"]
    assert found["early"] == []
    return found


def test_the_names_differ():
    assert len(set(NAMES)) == len(NAMES)


def test_with_nothing_missing(outcomes):
    found = answer(outcomes, "nothing")
    assert (found["error"], found["warnings"]) == (None, [])
    assert found["available"]


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_alone(outcomes, patch):
    if patch.name in outcomes["absent"]:
        pytest.skip(f"{patch.package} is not installed")
    found = answer(outcomes, patch.name)
    missing = patch.needs[0].where.replace(":", ".").rpartition(".")[2]
    version = versions.found(patch.package)
    if patch.required:
        said = found["error"]
        assert said.startswith("RuntimeError: The device 'tpu' could not be registered with PyTorch")
        assert found["warnings"] == []
        assert not found["available"]
    else:
        assert found["error"] is None
        (said,) = found["warnings"]
        assert said.endswith(f"This feature is off: {patch.feature}.")
    assert f"he patch '{patch.name}' does not fit {patch.package} {version}: " in said
    assert f"has no {missing} " in said
    assert f"tested with {patch.package} {versions.tested(patch.package)})" in said


def test_every_optional_patch_at_once(outcomes):
    found = answer(outcomes, "every optional patch")
    assert found["error"] is None
    named = sorted(said.split("'")[1] for said in found["warnings"])
    assert named == sorted(p.name for p in PATCHES if not p.required and p.name not in outcomes["absent"])


def test_every_patch_at_once(outcomes):
    found = answer(outcomes, "every patch")
    assert "the patch 'registration' does not fit" in found["error"]
    assert found["warnings"] == []


def test_a_jaxlib_that_lacks_a_name(outcomes):
    first, second = outcomes["jaxlib"]
    found = versions.found("jaxlib")
    assert first == second
    assert first.startswith(f"RuntimeError: jaxlib {found} is not supported: ")
    assert "'make_cpu_client'" in first
    assert first.endswith(f"torch_tpu was tested with jaxlib {versions.tested('jaxlib')}.")


NEEDS = [(patch, need) for patch in PATCHES for need in patch.needs]


@pytest.mark.parametrize(("patch", "need"), NEEDS, ids=[f"{patch.name}-{need.where}" for patch, need in NEEDS])
def test_every_object_is_looked_for(outcomes, patch, need):
    if patch.name in outcomes["absent"]:
        pytest.skip(f"{patch.package} is not installed")
    state, before, of_need, of_patch, after = outcomes["objects"][f"{patch.name}-{need.where}"]
    assert of_need.endswith(f" has no {need.where.replace(':', '.').rpartition('.')[2]}")
    assert of_patch
    assert before == after
    # What a patch has put in place need not look like what it replaced.
    assert before == "" or state == "applied"


LATER = """
import logging, sys, warnings
import torch, torch_tpu
from tests.patching.hiding import hidden
from torch_tpu.patching import patch_registry as registry

# From here on the objects of every patch are missing when it looks for them.
fits = registry.Patch.problem
def problem(patch):
    with hidden(patch.needs[0].where):
        return fits(patch)
registry.Patch.problem = problem
warnings.filterwarnings("error", "The patch")

compiled = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")
print(compiled(torch.ones(3)).item())
import torch._inductor.compile_fx

for _ in range(2):
    try:
        torch.ones(3, device="tpu")
    except UserWarning as said:
        print(said)
warnings.filterwarnings("ignore", "The patch")
print(torch.ones(3, device="tpu").tolist())
warnings.filterwarnings("error", "The patch")

logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
import safetensors
print(compiled(torch.full((2,), 2.0)).item())
try:
    torch.compile(lambda x: x + 1, backend="tpu")(torch.ones(3, device="tpu"))
except Exception as error:
    print(str(error).splitlines()[1])
"""


def test_modules_that_are_imported_later():
    """What does not fit is said when the device is used; an import goes through, even where warnings are errors."""
    pytest.importorskip("safetensors")
    run = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "6.0"
    warned = [line for line in lines if line.startswith("The patch")]
    assert len(warned) == 2
    assert len(set(warned)) == 2
    (logged,) = [line for line in lines if line.startswith("log: ")]
    assert logged.startswith("log: The patch 'safetensors: open' does not fit safetensors")
    assert lines[-2] == "8.0"
    assert "[1.0, 1.0, 1.0]" in lines
    assert "off on 'tpu': torch.compile works with tensors of the device. Reason: the patch 'Dynamo'" in lines[-1]


def test_inductor_on_the_cpu_loads_nothing_of_the_device(outcomes):
    assert outcomes["inductor"] == {"result": [2, 2], "loaded": []}
