"""The disk cache: entries survive a process, damage costs a compilation and a warning, the size stays bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_tpu import metrics
from torch_tpu.runtime import disk_cache
from torch_tpu.runtime.disk_cache import DiskCache, from_environment

KEY, OTHER = "ab" + "0" * 62, "cd" + "1" * 62

# Runs a few programs, one with LAPACK where that can be called, and says what it computed and how it came by them.
PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, torch_tpu
    from torch_tpu import metrics
    x = torch.arange(6.0).reshape(2, 3).to("tpu")
    values = [(x @ x.T + 1).tolist(), torch.linalg.cholesky(x @ x.T + torch.eye(2, device="tpu")).sum().item()]
print(json.dumps([values, metrics.counters(), [str(w.message) for w in caught]]))
"""


def start(folder: Path | str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TORCH_TPU_CACHE_DIR": str(folder), **environment}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> tuple[object, dict[str, float], list[str]]:
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    values, counters, warnings = json.loads(out.splitlines()[-1])
    return values, counters, [w for w in warnings if "torch_tpu" in w]


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A folder filled by one process, and what that process said."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, answer(start(folder))


def entries(folder: Path) -> list[Path]:
    """The compiled programs; beside them stand plans and the table of kernels."""
    found = sorted(folder.glob(f"*/*{disk_cache.SUFFIX}"))
    return [path for path in found if not any(mark in path.read_bytes() for mark in (b"torch_tpu plan", b'{"rows":'))]


def test_a_second_process_compiles_nothing(cold):
    folder, (values, counters, warnings) = cold
    assert values[0] == [[6.0, 15.0], [15.0, 51.0]]
    assert counters["compile"] == len(entries(folder)) > 0
    assert warnings == []
    again, warm, warnings = answer(start(folder))
    assert again == values
    assert "compile" not in warm
    assert warm["disk_cache_hit"] == counters["compile"]
    assert warnings == []


def test_damaged_entries_are_compiled_again(cold, tmp_path):
    """Cut off, foreign, one bit wrong, of another program, empty: one kind after the other."""
    folder, (values, counters, _) = cold
    paths = entries(folder)
    assert len(paths) >= 5
    for i, path in enumerate(paths):
        content = path.read_bytes()
        damaged = (
            content[: len(content) // 2],
            b"#!/bin/sh\necho something else\n",
            content[:-1] + bytes([content[-1] ^ 1]),
            paths[i - 1].read_bytes(),
            b"",
        )
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(damaged[i % 5])
    again, warm, warnings = answer(start(tmp_path))
    assert again == values
    assert warm["compile"] == counters["compile"]
    assert sum("compiles a program again" in w for w in warnings) == counters["compile"]
    assert "compile" not in answer(start(tmp_path))[1]


def test_an_entry_the_compiler_cannot_load_is_compiled_again(cold, tmp_path):
    folder, (values, counters, _) = cold
    cache = DiskCache(tmp_path)
    for path in entries(folder):
        cache.write(path.stem, b"a valid entry of something that is no executable")
    again, warm, warnings = answer(start(tmp_path))
    assert again == values
    assert warm["compile"] == counters["compile"]
    assert any("can't be loaded" in w for w in warnings)


def test_processes_that_start_together_compile_each_program_once(cold, tmp_path):
    processes = [start(tmp_path) for _ in range(3)]
    answers = [answer(p) for p in processes]
    assert all(values == cold[1][0] for values, _, _ in answers)
    assert sum(counters.get("compile", 0) for _, counters, _ in answers) == cold[1][1]["compile"]


def test_a_killed_process_leaves_a_usable_cache(cold, tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not entries(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(entries(tmp_path)) < cold[1][1]["compile"]
    values, counters, warnings = answer(start(tmp_path))
    assert values == cold[1][0]
    assert counters["disk_cache_hit"] >= 1
    assert warnings == []


def test_a_folder_that_is_a_file_costs_a_warning(cold, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    values, counters, warnings = answer(start(tmp_path / "file"))
    assert values == cold[1][0]
    assert counters["disk_cache_write_error"] >= counters["compile"] == cold[1][1]["compile"]
    assert len([w for w in warnings if "can't be written" in w]) == 1


def test_a_full_disk_costs_a_warning(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path)

    def full(source: str, target: str, **folders: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        cache.write(KEY, b"payload")
    assert cache.read(KEY) is None
    assert list(tmp_path.glob("*/*")) == []


def test_no_folder_means_no_cache(cold):
    values, counters, warnings = answer(start(""))
    assert values == cold[1][0]
    assert counters["compile"] == cold[1][1]["compile"]
    assert warnings == []


def test_other_flags_are_other_programs(cold):
    _, counters, _ = answer(start(cold[0], XLA_FLAGS="--xla_cpu_enable_fast_min_max=false"))
    assert counters["compile"] == cold[1][1]["compile"]


def test_only_the_owner_may_read_and_write(tmp_path):
    folder = tmp_path / "new"
    DiskCache(folder).write(KEY, b"payload")
    assert (folder / "ab").stat().st_mode & 0o777 == 0o700
    assert entries(folder)[0].stat().st_mode & 0o777 == 0o600


def test_the_least_recently_used_entries_leave_first(tmp_path):
    cache = DiskCache(tmp_path, limit=1100)
    keys = [f"{i:02x}" + "0" * 62 for i in range(4)]
    for age, key in enumerate(keys):
        cache.write(key, b"x" * 200)
        os.utime(cache.path(key), (1000 + age, 1000 + age))
    assert cache.read(keys[0]) == b"x" * 200  # used now
    cache.write(OTHER, b"y" * 200)
    cache.shrink()
    left = [key for key in [*keys, OTHER] if cache.path(key).exists()]
    assert keys[0] in left
    assert OTHER in left
    assert keys[1] not in left
    assert cache.stats().nbytes <= 0.8 * 1100


def test_writing_keeps_the_folder_under_its_limit(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    for i in range(100):
        cache.write(f"{i:02x}" + "0" * 62, b"x" * 500)
        assert cache.stats().nbytes <= 11_000
    assert cache.stats().entries > 10


def test_what_killed_writers_left_is_removed(tmp_path):
    cache = DiskCache(tmp_path)
    cache.write(KEY, b"payload")
    old, new = tmp_path / "ab" / "old.tmp", tmp_path / "ab" / "new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    cache.shrink()
    assert not old.exists()
    assert new.exists()
    assert cache.clear() == 1
    assert cache.stats() == disk_cache.Stats(0, 0)


def test_environment(tmp_path):
    assert from_environment({"TORCH_TPU_CACHE_DIR": ""}) is None
    chosen = from_environment({"TORCH_TPU_CACHE_DIR": str(tmp_path), "TORCH_TPU_CACHE_BYTES": "5"})
    assert chosen is not None
    assert (chosen.folder, chosen.limit) == (tmp_path, 5)
    with pytest.raises(ValueError, match="number of bytes"):
        from_environment({"TORCH_TPU_CACHE_BYTES": "8 GiB"})
    default = from_environment({})
    assert default is not None
    assert default.folder == disk_cache.default_folder()


def test_reading_counts_an_error_once_warned(tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / f"{KEY}{disk_cache.SUFFIX}").mkdir()  # reading it fails, whoever asks
    cache = DiskCache(tmp_path)
    before = metrics.counters().get("disk_cache_read_error", 0)
    with pytest.warns(UserWarning, match="can't be read"):
        assert cache.read(KEY) is None
    assert cache.read(KEY) is None
    assert metrics.counters().get("disk_cache_read_error", 0) == before + 2
