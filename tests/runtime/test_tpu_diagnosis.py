"""Why a TPU does not start: what doctor says of errors, device files and plugins that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_tpu import cli
from torch_tpu.runtime import tpu_diagnosis


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("NOT_FOUND: TPU initialization failed: No jellyfish device found.", "sees no TPU chip"),
        ("ABORTED: The TPU is already in use by process with pid 4711.", "End that process"),
        ("Internal error when accessing libtpu multi-process lockfile.", "rm /tmp/libtpu_lockfile"),
        ("Couldn't open iommu group /dev/vfio/0: Device or resource busy", "TPU_VISIBLE_CHIPS"),
        ("open(/dev/accel0): Operation not permitted", "--privileged"),
        ("PERMISSION_DENIED: open /dev/vfio/0: Permission denied", "--privileged"),
        ("NOT_FOUND: GetPjrtApi not found in /lib/libm.so", "not a PJRT plugin"),
        ("Mismatched PJRT C API version: framework 0.90, plugin 0.54", "same version of PJRT"),
        ("DEADLINE_EXCEEDED: slice builder worker 1 did not answer", "TPU_WORKER_HOSTNAMES"),
        ("something else", ""),
    ],
)
def test_errors_have_advice(said, advice):
    assert advice in tpu_diagnosis.advice(said)
    assert bool(advice) == bool(tpu_diagnosis.advice(said))


@pytest.fixture
def chips(tmp_path):
    """Device files of four chips: two of each driver, and what belongs to none."""
    (tmp_path / "vfio").mkdir()
    for name in ("accel0", "accel1", "accelerometer", "vfio/0", "vfio/3", "vfio/vfio"):
        (tmp_path / name).touch()
    return tmp_path


def test_device_files_are_found(chips):
    assert [str(f.relative_to(chips)) for f in tpu_diagnosis.device_files(chips)] == [
        *("accel0", "accel1", "vfio/0", "vfio/3")
    ]
    assert tpu_diagnosis.device_files(chips / "none") == []


def test_who_holds_a_chip_is_found(chips, tmp_path):
    processes = tmp_path / "processes"
    for number, target in (
        ("11", chips / "vfio" / "0"),
        ("12", Path(os.devnull)),
        (str(os.getpid()), chips / "accel0"),
    ):
        (processes / number / "fd").mkdir(parents=True)
        (processes / number / "fd" / "3").symlink_to(target)
        (processes / number / "comm").write_text("python3\n")
    assert tpu_diagnosis.holders(tpu_diagnosis.device_files(chips), processes) == {11: "python3"}


def report(monkeypatch, plugin, folder):
    monkeypatch.setenv("TORCH_TPU_PLATFORM", f"tpu:{plugin}")
    monkeypatch.setattr(tpu_diagnosis.device_files, "__defaults__", (folder,))
    return CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "300"})


def test_doctor_explains_a_plugin_that_is_none(monkeypatch, chips, tmp_path):
    plugin = tmp_path / "plugin.so"
    plugin.write_text("no library")
    shown = report(monkeypatch, plugin, chips)
    assert shown.exit_code == 1
    assert "vfio/3" in shown.stdout
    assert "file too short" in shown.stdout
    assert "not a PJRT plugin for this machine" in " ".join(
        shown.stdout.split()
    )  # the terminal may break the line there


def test_doctor_explains_missing_permission(monkeypatch, chips, tmp_path):
    monkeypatch.setattr(tpu_diagnosis.os, "access", lambda file, mode: file.name != "3")
    shown = report(monkeypatch, Path(sys.executable), chips)
    assert shown.exit_code == 1
    assert "vfio/3: this user may not open" in shown.stdout
    assert "accel0: this" not in shown.stdout


def test_doctor_tells_who_holds_the_chips(monkeypatch, chips):
    monkeypatch.setattr(tpu_diagnosis, "holders", lambda files: {4711: "python3"})
    answers = {cli.PROBE: [1, "TPU v5e", 2**34], cli.PATCHES_PROBE: []}

    def answer(command, **kwargs):
        return subprocess.CompletedProcess(command, 0, json.dumps(answers[command[-1]]), "")

    monkeypatch.setattr(cli.subprocess, "run", answer)
    shown = report(monkeypatch, Path(sys.executable), chips)
    assert "open in python3 (process 4711)" in shown.stdout
    assert "TPU_VISIBLE_CHIPS" in shown.stdout
