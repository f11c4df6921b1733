"""The lists of what is known to fail or to run on the CPU say nothing that is no longer so."""

from __future__ import annotations

import pytest

from tools.conformance import check, known


def test_failures() -> None:
    for (entry, name), reason in known.FAILURES.items():
        outcome = check.run(entry, checks=[name])
        assert outcome.failures, f"{entry} passes {name}: take it out of tools/conformance/known.py ({reason})"


def test_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    for name, (reason, example) in known.FALLBACKS.items():
        outcome = check.run(example, samples=3)
        assert name in outcome.fallbacks, f"{name} is not needed: take it out of tools/conformance/known.py ({reason})"
