"""A process with many loaded programs forgets them before Linux has no mappings left, which would crash it."""

from pathlib import Path

import pytest
import torch

from torch_tpu import hooks, metrics
from torch_tpu.runtime import memory_mappings

pytestmark = pytest.mark.skipif(not memory_mappings.MAPS.exists(), reason="only Linux shows a process's mappings")


def used() -> int:
    return len(memory_mappings.MAPS.read_text().splitlines())


def test_programs_are_forgotten_when_mappings_run_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (torch.ones(3).to("tpu") * 2).cpu()  # starts the client, which takes some itself
    hooks.forget_programs()
    before = used()
    limit = tmp_path / "max_map_count"
    limit.write_text(str(int((before + 60) / memory_mappings.NEAR)))
    monkeypatch.setattr(memory_mappings, "LIMIT", limit)
    monkeypatch.setattr(memory_mappings, "LOADS_BETWEEN_LOOKS", 1)
    forgotten = metrics.counters().get("programs_forgotten", 0)
    x = torch.arange(4000.0)
    most = 0
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER):
        device = x.to("tpu")
        for n in range(1000, 1100):
            assert torch.equal((device[:n] * 2).cpu(), x[:n] * 2)
            most = max(most, used())
    assert metrics.counters().get("programs_forgotten", 0) > forgotten
    # 100 programs would take 300 mappings; the limit lets through 60 and one program.
    assert most - before < 90


def test_a_system_that_does_not_say_has_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_mappings, "LOADS_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(memory_mappings, "LIMIT", tmp_path / "missing")
    assert not memory_mappings.Watch().is_near_limit()
    (tmp_path / "full").write_text("1")
    monkeypatch.setattr(memory_mappings, "LIMIT", tmp_path / "full")
    assert memory_mappings.Watch().is_near_limit()
