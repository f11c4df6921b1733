"""Long work says how far it is where the output is no terminal; the demonstration fits its training into its time."""

from __future__ import annotations

import io
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from torch_tpu import progress
from torch_tpu.demo import language_model
from torch_tpu.planner import __main__ as planning

WAIT = 120


class Log(io.StringIO):
    """An output that is no terminal, and says when a text has been written to it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.text in self.getvalue():
            self.written.set()
        return count


@pytest.mark.parametrize(
    ("total", "done", "note", "seconds", "line"),
    [
        (600, 0, "", 10.2, "work: 0 of 600 (0%), 10 s so far"),
        (600, 120, "loss 2.310", 12, "work: 120 of 600 (20%), loss 2.310, 12 s so far, about 48 s left"),
        (2000, 1000, "", 3725, "work: 1,000 of 2,000 (50%), 1 h 2 min so far, about 1 h 2 min left"),
        (600, 600, "", 65, "work: 600 of 600 (100%), 1 min 5 s so far"),
        (None, 3, "step 3", 20, "work: step 3, 20 s so far"),
        (0, 0, "", 20, "work: 0 of 0 (0%), 20 s so far"),
    ],
)
def test_a_line(total: int | None, done: int, note: str, seconds: float, line: str) -> None:
    task = progress.Task("work", total)
    task.advance(done, note)
    assert task.line(seconds) == line


def test_lines_come_whether_or_not_the_work_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    log = Log("work: 0 of 4 (0%)")
    with progress.shown("work", 4, Console(file=log, width=20)) as task:
        assert log.written.wait(WAIT)
        log.text = "work: 3 of 4 (75%), [a note] that is longer than the console is wide"
        log.written.clear()
        task.advance(3, "[a note] that is longer than the console is wide")
        assert log.written.wait(WAIT)
    ended = log.getvalue()
    assert ended.endswith("left\n")
    assert "\r" not in ended
    assert "\x1b" not in ended
    assert not [t for t in threading.enumerate() if t.name == "torch_tpu progress"]


def test_short_work_writes_nothing_into_a_log() -> None:
    log = Log("?")
    with progress.shown("work", 4, Console(file=log)) as task:
        task.advance(4)
    assert log.getvalue() == ""


def test_a_terminal_has_a_bar() -> None:
    screen = io.StringIO()
    with progress.shown("work", 4, Console(file=screen, force_terminal=True, width=100)) as task:
        task.advance(3, "a note")
        assert task.done == 3
    assert "work" in screen.getvalue()
    assert "3/4" in screen.getvalue()
    assert "a note" in screen.getvalue()


def test_a_failure_ends_the_lines() -> None:
    with pytest.raises(ValueError, match="why"), progress.shown("work", console=Console(file=io.StringIO())):
        raise ValueError("why")
    assert not [t for t in threading.enumerate() if t.name == "torch_tpu progress"]


def test_planning_says_what_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script first, then its programs."""
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    log = Log("train.py runs without values: 0 s so far")

    def plan_script(*arguments: object) -> object:
        assert log.written.wait(WAIT)
        log.text = "compiling for v5e:1x1: 1 of 3 (33%)"
        log.written.clear()
        compiled = next(a for a in arguments if callable(a))
        compiled(1, 3)
        assert log.written.wait(WAIT)
        return SimpleNamespace(to_json=lambda: "{}")

    monkeypatch.setattr(planning, "plan_script", plan_script)
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(sys, "argv", ["plan", "--target", "v5e:1x1", "--json", str(tmp_path / "plan"), "train.py"])
    planning.main()
    assert "compiled 1 of 3 programs\n" in log.getvalue()


def test_steps_that_fit_into_a_time() -> None:
    assert language_model.steps_within(100, 0.5, 600) == 200
    assert language_model.steps_within(104.9, 0.5, 600) == 200
    assert language_model.steps_within(1000, 0.5, 600) == 600
    assert language_model.steps_within(1, 0.5, 600) == language_model.FEWEST
    assert language_model.steps_within(-5, 0.5, 600) == language_model.FEWEST


TINY = language_model.Size(width=8, layers=1, heads=1, context=8, batch=2, steps=60, sample=45)


def test_training_ends_when_its_time_is_up_but_compares_enough() -> None:
    text = language_model.Text.of_python_topics()
    _, losses = language_model.train("cpu", TINY, text, until=-math.inf)
    assert len(losses) == language_model.COMPARED
    seen: list[str] = []
    _, all_losses = language_model.train("cpu", TINY, text, lambda count, note: seen.append(note))
    assert len(all_losses) == len(seen) == TINY.steps
    assert all_losses[: len(losses)] == losses


def test_the_training_of_the_demonstration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says how long it will train before it does, and compares with the CPU although its time is up."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(language_model, "QUICK", TINY)
    monkeypatch.setattr(language_model, "SAMPLE_SECONDS", 0)
    log = io.StringIO()
    assert language_model.run(Console(file=log, width=200), quick=True, output=tmp_path, until=0)
    said = log.getvalue()
    assert "60 steps: about " in said
    assert "on the CPU the first 20 at least" in said
    assert said.index("60 steps") < said.index("symbols of text") < said.index("they agree")
    assert (tmp_path / "loss.png").stat().st_size > 0
    written = said.rstrip("\n").rpartition("per symbol:\n")[2]
    assert written.startswith(language_model.PROMPT)
