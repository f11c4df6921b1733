"""The random programs themselves: the same for a seed, of every kind; faults are found and shrunk to a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch

from tools.random_programs.check import check
from tools.random_programs.generate import LENGTH, generate
from tools.random_programs.kinds import KINDS
from tools.random_programs.program import Program, Step, script
from tools.random_programs.results import Result, generator_digest, load, save
from tools.random_programs.run import Invalid, run
from tools.random_programs.shrink import shrink
from tools.random_programs.state import Comparison, snapshot
from torch_tpu.eager.kernels import copy
from torch_tpu.eager.program import plan_table
from torch_tpu.ops.core import families, registry
from torch_tpu.recent import Recent


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [generate(seed) for seed in range(200)]


def test_a_seed_is_a_program(programs: list[Program]) -> None:
    assert [generate(seed) for seed in range(5)] == programs[:5]
    assert len({str(p) for p in programs}) == len(programs)
    assert all(len(p.steps) == LENGTH for p in programs)


def test_every_kind_of_step_occurs(programs: list[Program]) -> None:
    counts = Counter(step.kind for p in programs for step in p.steps)
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 2
    text = "\n".join(map(str, programs))
    for part in ("as_strided", "::2", "requires_grad_", "out=t", ".unfold(", "inf", "2**", "1j", "None", "..."):
        assert part in text
    # Programs go on after what the CPU refuses, but are mostly made of what it does.
    refused = sum(step.raises is not None for p in programs for step in p.steps)
    assert 100 <= refused <= 600
    dtypes = ("bfloat16", "float16", "float64", "complex64", "int64", "int8", "uint8", "bool")
    assert min(sum(f"dtype=torch.{d}" in str(p) for p in programs) for d in dtypes) >= 5


def steps(*sources: str) -> tuple[Step, ...]:
    return tuple(Step(source, "") for source in sources)


@pytest.mark.parametrize(
    ("kind", "want", "got"),
    [
        ("values", "torch.tensor([1.0, 2.0])", "torch.tensor([1.0, 2.001])"),
        ("values", "torch.tensor([1, 2])", "torch.tensor([1, 3])"),
        ("values", "torch.tensor([True])", "torch.tensor([False])"),
        ("values", "torch.tensor([1.0, nan])", "torch.tensor([1.0, 2.0])"),
        ("values", "torch.tensor(1 + 1j)", "torch.tensor(1 - 1j)"),
        ("values", "torch.tensor([0.5], dtype=torch.bfloat16)", "torch.tensor([0.6], dtype=torch.bfloat16)"),
        ("dtype", "torch.ones(2)", "torch.ones(2, dtype=torch.float64)"),
        ("shape", "torch.ones(2, 1)", "torch.ones(1, 2)"),
        ("strides", "torch.ones(2, 3)", "torch.ones(3, 2).t()"),
        ("offset", "torch.ones(2)", "torch.ones(3)[1:]"),
        ("requires_grad", "torch.ones(2)", "torch.ones(2, requires_grad=True)"),
        ("is_leaf", "torch.ones(2, requires_grad=True)", "torch.ones(2, requires_grad=True) * 1"),
        ("is_view", "torch.ones(2)", "torch.ones(2)[:]"),
        ("conj", "torch.ones(2, dtype=torch.complex64)[:]", "torch.ones(2, dtype=torch.complex64).conj()"),
        ("shares", "t0.detach()", "t0.clone()"),
    ],
)
def test_a_difference_is_found(kind: str, want: str, got: str) -> None:
    states = []
    for source in (got, want):
        names = {"torch": torch, "nan": float("nan"), "t0": torch.zeros(2)}
        names["t1"] = eval(source, names)
        states.append(snapshot(names))
    assert kind in [d.kind for d in Comparison().differences(*states)]
    assert Comparison().differences(states[1], states[1]) == []


def test_rounding_is_no_difference() -> None:
    one = {"t0": torch.tensor([1.0, 200.0])}
    other = {"t0": torch.tensor([1.0 + 2**-22, 200.0 + 2**-15])}
    assert Comparison().differences(snapshot(one), snapshot(other)) == []


def test_writes_are_counted() -> None:
    names = {"t0": torch.zeros(2)}
    comparison = Comparison()
    before = snapshot(names)
    assert comparison.differences(before, before) == []
    names["t0"].add_(0)
    assert [d.kind for d in comparison.differences(snapshot(names), before)] == ["writes"]


def test_a_wrong_lowering_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sine gets a small error; what has nothing to do with it goes."""
    families.load()
    rule = registry.find(torch.ops.aten.sin.default)
    assert rule is not None
    right = rule.function
    monkeypatch.setattr(plan_table, "plans", Recent(4096))
    object.__setattr__(rule, "function", lambda *args, **extras: right(*args, **extras) * 1.001)
    try:
        program = steps(
            "t0 = torch.tensor([0.5, 1.0, 2.0], device=device)",
            "t1 = torch.ones(3, device=device)",
            "t2 = t0 + t1",
            "t3 = t0[::2]",
            "t1.mul_(3)",
            "t4 = t3.sin()",
            "t5 = t4 * 2",
        )
        failure = run(program)
        assert failure is not None
        assert (failure.at, failure.kind) == (5, "values")
        shorter, failure = shrink(program, failure, run)
        assert [s.source for s in shorter] == [program[0].source, program[3].source, program[5].source]
        assert failure.at == 2
    finally:
        object.__setattr__(rule, "function", right)


def test_a_write_that_is_lost_is_found_in_drawn_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies into views go nowhere: some of the first programs fail, each at a line that writes."""
    owns_storage = copy.owns_storage
    monkeypatch.setattr(copy, "as_program", lambda func: lambda dst, *rest, **options: dst)
    monkeypatch.setattr(copy, "clone", lambda t, **options: t.cpu().clone(**options).to("tpu"))
    reports = [report for seed in range(8) if (report := check(seed)) is not None]
    assert reports
    assert owns_storage is copy.owns_storage
    bodies = [report.split("def program(device):")[1].split("return")[0] for report in reports]
    assert max(len(body.splitlines()) for body in bodies) < LENGTH


def test_an_exception_of_another_type_is_a_difference() -> None:
    refused = Step("t0[5]", "", raises="IndexError")
    known = steps("t0 = torch.zeros(2, device=device)")
    assert run([*known, refused]) is None
    with pytest.raises(Invalid):
        run([*known, Step("t0[1]", "", raises="IndexError")])
    only_here = Step("if device.type == 'tpu': raise KeyError", "")
    failure = run([*known, only_here])
    assert failure is not None
    assert (failure.at, failure.kind) == (1, "raises")


@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
def test_every_execution_mode(mode: str) -> None:
    assert all(run(generate(seed).steps, mode) is None for seed in range(3))


def test_a_report_is_a_script() -> None:
    text = script(
        [
            Step("t0 = torch.arange(3., device=device).requires_grad_()", ""),
            Step("t0[7]", "", raises="IndexError"),
            Step("(t0 * t0).sum().backward()", ""),
        ]
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("tensor([0., 2., 4.])") == 2


def test_results_are_kept_by_seed_and_generator(tmp_path) -> None:
    path = tmp_path / "programs.jsonl"
    mine = generator_digest()
    save(path, [Result(1, "strict", mine, None), Result(2, "debug", mine, None), Result(3, "strict", "other", None)])
    save(path, [Result(1, "strict", mine, "differs"), Result(4, "strict", mine, None)])
    assert {seed: r.report for seed, r in load(path, "strict").items()} == {1: "differs", 4: None}
