"""The command `torch-tpu`: what doctor reports and returns, and how demo is started."""

import json
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_tpu import cli
from torch_tpu.runtime import disk_cache, platform
from torch_tpu.runtime.generations import GIB

runner = CliRunner()


@pytest.fixture(autouse=True)
def known_environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TORCH_TPU_PLATFORM", "cpu")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.delenv("TORCH_TPU_DEVICE_NAME", raising=False)


PATCHES = [
    {"name": "print", "feature": "tensors are printed", "state": "applied"},
    {"name": "open", "feature": "files are read", "state": "not needed yet", "note": "it is not there"},
]


@pytest.fixture
def probe(monkeypatch):
    """Replaces the processes in which doctor tries the device and the patches: the test sets what comes of it."""
    answer = subprocess.CompletedProcess([], 0, json.dumps([1, "TPU v5e", 8 * GIB]), "")

    def run(command, **kwargs):
        if command[-1] == cli.PATCHES_PROBE:
            return subprocess.CompletedProcess(
                [], 0, json.dumps([{"reason": "", "note": "", "required": False} | p for p in PATCHES]), ""
            )
        if isinstance(answer, Exception):
            raise answer
        return answer

    def set_answer(new):
        nonlocal answer
        answer = new

    monkeypatch.setattr(cli.subprocess, "run", run)
    return set_answer


@pytest.fixture
def installed(monkeypatch):
    """The versions that doctor sees; a package that is not in here is not installed."""
    versions = {"torch": "2.13.0+cpu", "jaxlib": "0.10.2", "ml_dtypes": "0.6.0", "libtpu": "0.0.52"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(cli.metadata, "version", version)
    monkeypatch.setattr(cli.metadata, "requires", lambda name: ["torch>=2.13", "jaxlib>=0.10.2", "ml-dtypes", "rich"])
    return versions


def row(output, subject):
    """The table's line about `subject`, with its mark and single spaces."""
    lines = (" ".join(text.split()) for text in output.splitlines())
    return next(text for text in lines if text[2:].startswith(f"{subject} "))


def test_doctor_on_a_healthy_machine(probe, installed):
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert row(result.output, "torch") == "✓ torch 2.13.0+cpu"
    assert row(result.output, "jaxlib") == "✓ jaxlib 0.10.2"
    assert row(result.output, "platform") == "✓ platform cpu (XLA:CPU in jaxlib): TORCH_TPU_PLATFORM=cpu"
    assert row(result.output, "stand-in") == "✓ stand-in XLA:CPU runs the programs; the device calls itself TPU v5e"
    assert row(result.output, "device") == "✓ device 1 × TPU v5e, 8.0 GiB; computed 2×3 @ 3×2 correctly"
    assert "The device works." in result.output


def test_doctor_says_when_a_package_is_too_old(probe, installed):
    installed["torch"] = "2.9.1"
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ torch: run `pip install 'torch>=2.13'`." in result.output
    assert "The device is not usable." in result.output


def test_doctor_says_when_a_package_is_missing(probe, installed):
    del installed["jaxlib"]
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ jaxlib: run `pip install torch-tpu`." in result.output


def test_doctor_does_without_libtpu(probe, installed):
    del installed["libtpu"]
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert row(result.output, "libtpu") == "✓ libtpu not installed: only needed on TPUs and to compile for them"


def test_doctor_explains_a_bad_platform(probe, installed, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_PLATFORM", "gpu")
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ platform: TORCH_TPU_PLATFORM='gpu' is not a platform. Use auto, cpu, tpu" in result.output


def test_doctor_points_at_libtpu_where_chips_go_unused(probe, installed, monkeypatch):
    chip = platform.Chip("0000:00:05.0", platform.generation_named("TPU v6e"))
    monkeypatch.setattr(platform, "find_chips", lambda *args: (chip,) * 4)
    monkeypatch.setattr(platform, "find_libtpu", lambda *args: None)
    monkeypatch.delenv("TORCH_TPU_PLATFORM")
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert row(result.output, "TPU chips") == "✓ TPU chips 4 × TPU v6e"
    assert "! platform: 4 TPU chips on the PCI bus, but libtpu is not installed" in result.output
    assert "Run `pip install 'torch-tpu[tpu]'`." in result.output


def test_doctor_has_no_advice_where_chips_go_unused_on_purpose(probe, installed, monkeypatch):
    chip = platform.Chip("0000:00:05.0", platform.generation_named("TPU v6e"))
    monkeypatch.setattr(platform, "find_chips", lambda *args: (chip,) * 4)
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert row(result.output, "platform") == "✓ platform cpu (XLA:CPU in jaxlib): TORCH_TPU_PLATFORM=cpu"


def test_doctor_notes_that_autoload_is_off(probe, installed, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert "! autoload: a program must `import torch_tpu` before" in result.output


def test_doctor_shows_the_error_of_a_broken_device(probe, installed):
    probe(subprocess.CompletedProcess([], 1, "", "Traceback ...\n  ...\nRuntimeError: no [tpu] here\n"))
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ device: RuntimeError: no [tpu] here" in result.output


def test_doctor_survives_a_crash_and_a_hang_of_the_device(probe, installed):
    probe(subprocess.CompletedProcess([], -11, "", ""))
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ device: exit code -11" in result.output
    probe(subprocess.TimeoutExpired([], 120))
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "no answer within 120 s" in result.output


def test_doctor_really_runs_the_device():
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "1 × TPU v5e" in row(result.output, "device")
    assert row(result.output, "storages") == "✓ storages applied"
    assert row(result.output, "Dynamo") == "✓ Dynamo applied"
    assert row(result.output, "stream guard") == "✓ stream guard not needed yet"


def test_doctor_says_when_a_package_is_newer_than_tested(probe, installed):
    installed["torch"] = "2.99.0"
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert row(result.output, "torch") == "! torch 2.99.0"
    assert "! torch: newer than the tested versions: 2.13.0." in result.output


def test_doctor_lists_patches(probe, installed):
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert row(result.output, "print") == "✓ print applied"
    assert row(result.output, "open") == "✓ open not needed yet: it is not there"


@pytest.mark.parametrize(("required", "mark", "code"), [(False, "!", 0), (True, "✗", 1)])
def test_doctor_says_which_patch_is_off(probe, installed, monkeypatch, required, mark, code):
    off = PATCHES[0] | {"state": "off", "reason": "it does not fit.", "required": required}
    monkeypatch.setitem(globals(), "PATCHES", [off])
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert row(result.output, "print") == f"{mark} print off"
    assert f"{mark} print: it does not fit. This feature is off: tensors are printed." in result.output


@pytest.mark.parametrize(
    ("arguments", "quick", "output"),
    [([], False, "demo-output"), (["--quick", "--output", "elsewhere"], True, "elsewhere")],
)
def test_demo_passes_its_options_and_returns_the_exit_code(monkeypatch, arguments, quick, output):
    calls = []
    module = types.ModuleType("torch_tpu.demo")
    module.main = lambda **options: calls.append(options) or 3
    monkeypatch.setitem(sys.modules, "torch_tpu.demo", module)
    result = runner.invoke(cli.app, ["demo", *arguments])
    assert calls == [{"quick": quick, "output": Path(output)}]
    assert result.exit_code == 3


def test_demo_names_a_package_it_lacks(monkeypatch, tmp_path):
    (tmp_path / "demo.py").write_text("import no_such_package")
    monkeypatch.delitem(sys.modules, "torch_tpu.demo", raising=False)
    monkeypatch.setattr("torch_tpu.__path__", [str(tmp_path)])
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "The demo needs no_such_package. Run `pip install 'torch-tpu[demo]'`." in result.output


def test_cache_commands(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path))
    disk_cache.DiskCache(tmp_path).write("ab" * 32, b"x" * 2**20)
    assert runner.invoke(cli.app, ["cache", "path"]).output.strip() == str(tmp_path)
    assert runner.invoke(cli.app, ["cache", "stats"]).output.startswith("1 programs, 1.0 MiB of 8,192 MiB")
    assert runner.invoke(cli.app, ["cache", "clear"]).output == "1 programs removed\n"
    assert runner.invoke(cli.app, ["cache", "stats"]).output.startswith("0 programs, 0.0 MiB")
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", "")
    off = runner.invoke(cli.app, ["cache", "stats"])
    assert off.exit_code == 1
    assert "TORCH_TPU_CACHE_DIR is empty" in off.output


def test_cache_commands_say_what_is_not_used(monkeypatch, tmp_path, probe, installed):
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path))
    disk_cache.DiskCache(tmp_path).write("ab" * 32, b"x")
    tmp_path.chmod(0o777)
    for command, code, said in (
        ("path", 0, f"{tmp_path}\n"),
        ("stats", 0, "0 programs, 0.0 MiB of 8,192 MiB\n"),
        ("clear", 1, "0 programs removed\n"),
    ):
        result = runner.invoke(cli.app, ["cache", command])
        assert (result.exit_code, result.stdout) == (code, said)
        assert f"Not used: other users may write to {tmp_path} (mode 0777)" in result.stderr
    said = " ".join(runner.invoke(cli.app, ["doctor"]).output.split())
    assert f"disk cache: other users may write to {tmp_path}" in said
    tmp_path.chmod(0o700)
    result = runner.invoke(cli.app, ["cache", "clear"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "1 programs removed\n", "")


def test_operators_says_that_it_needs_a_clone(monkeypatch):
    monkeypatch.setattr(cli, "__file__", "/nowhere/lib/torch_tpu/cli.py")
    result = runner.invoke(cli.app, ["operators"])
    assert result.exit_code == 1
    assert "needs a clone of the repository" in result.output
