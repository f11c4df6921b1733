"""The heap under XLA:CPU: tuned where nobody else has tuned it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_tpu.runtime import malloc_settings


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """What is asked of the C library."""
    found: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda name, value: found.append((name, value)))
    monkeypatch.setattr(malloc_settings.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(malloc_settings.platform, "libc_ver", lambda: ("glibc", "2.36"))
    for variable in [v for v in malloc_settings.os.environ if v.startswith("MALLOC_") or v == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(variable)
    return found


def test_freed_memory_is_kept(calls):
    malloc_settings.keep_freed_memory()
    assert (malloc_settings._MMAP_THRESHOLD, 32 * 2**20) in calls
    assert (malloc_settings._TRIM_THRESHOLD, 2**30) in calls


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX_", "GLIBC_TUNABLES"])
def test_a_user_who_has_tuned_it_is_left_alone(calls, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    malloc_settings.keep_freed_memory()
    assert calls == []


def test_another_c_library_is_left_alone(calls, monkeypatch):
    monkeypatch.setattr(malloc_settings.platform, "libc_ver", lambda: ("", ""))
    malloc_settings.keep_freed_memory()
    assert calls == []
