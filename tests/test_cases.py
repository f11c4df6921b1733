"""The command that runs a folder of small programs: what passes, fails, can't be compiled, or ends its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.cases import __main__ as command
from tools.cases import one, results, run

PASSES = "def case(device):\n    assert torch.ones(2, device=device).sum().item() == 2\n"
FAILS = "def case(device):\n    assert torch.ones(2, device=device).sum().item() == 3, 'it is 2'\n"
DIES = "def case(device):\n    os.abort()\n"
FAILS_HERE = "def case(device):\n    assert device == 'cpu'\n"
# PyTorch captures no graph of a derivative's derivative.
TWICE = """
def case(device):
    x = torch.ones(2, device=device, requires_grad=True)
    g = torch.autograd.grad((x ** 3).sum(), x, create_graph=True)[0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [6.0, 6.0]
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(f"import os\n\nimport torch\n\n\n{text}")
    return path


def test_a_failure_names_the_programs_line(tmp_path):
    assert one.run(program(tmp_path, "1_passes", PASSES), "tpu") == ""
    assert one.run(program(tmp_path, "2_fails", FAILS), "tpu") == "line 7: AssertionError: it is 2"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("first\nsecond", "first"),
        ("backend='tpu' raised:\nRuntimeError: why\n\nmore", "backend='tpu' raised: RuntimeError: why"),
        ("a graph break\n  Explanation: why\n  Hint: none", "a graph break Explanation: why"),
        ("", ""),
    ],
)
def test_a_failure_has_its_reason(message, said):
    assert one.message_of(RuntimeError(message), Path("1_program.py")) == f"RuntimeError: {said}"


def test_a_program_that_ends_its_process_fails(tmp_path):
    result = run.run(program(tmp_path, "1_dies", DIES), "strict", 300.0)
    assert result.outcome == "fail"
    assert result.failure.startswith("killed by signal 6")


@pytest.mark.parametrize(("text", "outcome"), [(PASSES, "pass"), (FAILS_HERE, "fail"), (TWICE, "cannot compile")])
def test_what_fails_compiled_is_tried_on_the_cpu(tmp_path, monkeypatch, text, outcome):
    monkeypatch.setattr(run, "_failure", lambda path, device, backend, *rest: one.run(path, device, backend))
    assert run.run(program(tmp_path, "1_program", text), "compiled", 300.0).outcome == outcome


@pytest.mark.parametrize(
    ("failure", "refusal", "outcome"),
    [
        ("", "", "pass"),
        ("no", "", "fail"),
        ("no", "another", "fail"),
        ("backend='tpu' raised: no", "backend='aot_eager' raised: no", "cannot compile"),
        ("no FakeTensor(..., device='tpu:0', size=(2,))", "no FakeTensor(..., size=(2,))", "cannot compile"),
    ],
)
def test_what_fails_alike_on_the_cpu_cannot_be_compiled(failure, refusal, outcome):
    assert results.Result("1_program", "", failure, refusal, 0.1).outcome == outcome


def test_a_run_continues_where_it_stopped(tmp_path, monkeypatch):
    ran = []

    def quick(path: Path, mode: str, timeout: float) -> results.Result:
        ran.append(path.stem)
        return results.Result(path.stem, results.digest_of(path), one.run(path, "tpu"), "", 0.1)

    monkeypatch.setattr(command, "run", quick)
    for name, text in (("2_fails", FAILS), ("10_passes", PASSES)):
        program(tmp_path, name, text)
    program(tmp_path, "helper", FAILS)
    arguments = [str(tmp_path), "--modes", "strict", "--output", str(tmp_path / "results")]

    first = CliRunner().invoke(command.app, arguments)
    assert first.exit_code == 1
    assert "line 7: AssertionError: it is 2" in first.output
    assert ran == ["2_fails", "10_passes"]

    CliRunner().invoke(command.app, [*arguments, "--only-failed"])
    assert ran == ["2_fails", "10_passes", "2_fails"]

    program(tmp_path, "2_fails", PASSES)
    assert CliRunner().invoke(command.app, arguments).exit_code == 0
    assert ran[3:] == ["2_fails"]
