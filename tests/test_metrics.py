"""The report names recompiles, waits, flushes and fallbacks with their reason and the user's line."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_tpu
from torch_tpu import hooks, metrics
from torch_tpu.metrics import programs
from torch_tpu.recent import Recent

EagerMode = torch.tpu.EagerMode
FUSED = EagerMode.DEFER_AND_FUSE


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What other tests have made would be found again, or be nearer to what these make.
    hooks.forget_programs()
    monkeypatch.setattr(programs, "_earlier", Recent(programs.MOST_NAMES))
    with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
        metrics.reset()
        yield


def line(mark: str) -> str:
    """`file:line` of the line of this file that ends with a comment."""
    lines = linecache.getlines(__file__)
    (number,) = (n for n, text in enumerate(lines, 1) if text.rstrip().endswith(f"# {mark}"))
    return f"{__file__}:{number}"


def recompiles(name: str) -> list[tuple[str, str]]:
    """Reason and line of each recompile of an operator, the latest first."""
    return [(r["reason"], r["line"]) for r in metrics.snapshot()["recompiles"] if r["name"] == name]


def events(kind: str) -> list[tuple[str, str, int]]:
    return [(e["what"], e["line"], e["count"]) for e in metrics.snapshot()[kind]]


# --- recompiles --------------------------------------------------------------------------------------------------


def test_a_shape_a_dtype_and_a_static_argument():
    x = torch.ones(3, 7, device="tpu")
    torch.logcumsumexp(x, 0)
    metrics.reset()
    torch.logcumsumexp(x, 0)
    assert recompiles("logcumsumexp") == []
    torch.logcumsumexp(x[:, :5].clone(), 0)  # other shape
    torch.logcumsumexp(x.double(), 0)  # other dtype
    torch.logcumsumexp(x, 1)  # other dimension
    assert recompiles("logcumsumexp") == [
        ("dim: 0 → 1", line("other dimension")),
        ("dtype of self: float32 → float64", line("other dtype")),
        ("shape of self: [3, 7] → [3, 5]", line("other shape")),
    ]


def test_the_nearest_earlier_signature_is_named():
    def run(*shape: int, dtype: torch.dtype = torch.float32) -> None:
        torch.special.i1e(torch.ones(shape, dtype=dtype, device="tpu"))

    run(2, 3)
    run(4, 3, dtype=torch.float64)
    metrics.reset()
    run(5, 3, dtype=torch.float64)
    (found,) = recompiles("special_i1e")
    assert found[0] == "shape of self: [4, 3] → [5, 3]"


def test_views_numbers_and_settings():
    x, whole = torch.ones(4, 6, device="tpu"), torch.ones(5, 6, device="tpu")
    y = torch.ones(6, 6, device="tpu")
    torch.fmod(x, 2.0)
    x @ y
    metrics.reset()
    torch.fmod(whole[:4], 2.0)  # a view
    torch.fmod(x, 3.0)  # other data
    torch.fmod(x, 2)  # an int
    with_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        x @ y  # other precision
    finally:
        torch.set_float32_matmul_precision(with_precision)
    assert recompiles("fmod.Scalar") == [
        ("type of other: float → int", line("an int")),
        ("memory of self: its own → a view of float32[5, 6]", line("a view")),
    ]
    assert ("float32 matmul precision: highest → medium", line("other precision")) in recompiles("mm")


def test_a_loop_over_shapes_is_one_line_of_the_report():
    for n in range(1, 5):
        torch.special.log_ndtr(torch.ones(n, device="tpu"))  # the loop
    text = metrics.report(10**6)
    assert f"special_log_ndtr ×3  at {line('the loop')}, after " in text
    assert "shape of self: [3] → [4]" in text
    assert "shape of self: [1] → [2]" not in text  # only the latest reason


def test_in_backward_the_line_is_that_of_the_call():
    for n in (6, 7):
        x = torch.ones(n, device="tpu", requires_grad=True)
        y = torch.nn.functional.hardsigmoid(x).sum()
        y.backward()  # backward
    assert recompiles("hardsigmoid_backward") == [
        ("shape of grad_output: [6] → [7]; shape of self: [6] → [7]", line("backward"))
    ]


def test_fused_programs_say_which_operator_is_new():
    def step(n: int) -> float:
        x = torch.ones(n, 3, device="tpu")
        y = (x * 2).frac()  # recorded
        return y.sum().item()  # needed

    with torch.tpu.set_eager_mode(FUSED):
        step(4)
        step(4)
        metrics.reset()
        step(4)
        assert metrics.snapshot()["recompiles"] == []
        step(5)
    (fused,) = (r for r in metrics.snapshot()["recompiles"] if r["kind"] == "fused")
    assert fused["line"] == line("needed")
    assert f"frac has another shape of self: [4, 3] → [5, 3] ({line('recorded')})" in fused["reason"]


def test_fused_programs_say_when_other_results_are_kept():
    def step(keep: bool) -> list[torch.Tensor]:
        x = torch.ones(3, 5, device="tpu")
        y = x.expm1()
        kept = [y] if keep else []
        z = y * 3
        del y
        z.sum().item()
        return kept

    with torch.tpu.set_eager_mode(FUSED):
        kept = [step(keep) for keep in (False, False, True)]
    assert kept[2][0].shape == (3, 5)
    reasons = [r["reason"] for r in metrics.snapshot()["recompiles"] if r["kind"] == "fused"]
    assert reasons[0] == "4 results are kept, not 3"


# --- torch.compile -----------------------------------------------------------------------------------------------


def test_graphs_say_why_they_were_captured_and_compiled_again():
    torch._dynamo.reset()

    @torch.compile
    def mean_square(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()

    for n in (2, 3, 4):
        mean_square(torch.ones(n, 5, device="tpu"))  # compiled
    static, dynamic = (g for g in metrics.snapshot()["graphs"] if "mean_square" in g["name"])
    assert (static["reason"], static["line"]) == ("", line("compiled"))
    assert "size mismatch at index 0. expected 2, actual 3" in dynamic["reason"]
    assert [p["reason"].split("; ")[-1] for p in dynamic["programs"]] == ["", "shape of arg1_1: [3, 5] → [4, 5]"]
    assert f"captured again: {dynamic['reason']}" in metrics.report(10**6)


# --- waits -------------------------------------------------------------------------------------------------------


def test_waits_have_their_kind_line_and_count():
    x = torch.arange(4.0, device="tpu")
    metrics.reset()
    for _ in range(3):
        x[2].item()  # item
    if x[1] > 0:  # bool
        pass
    float(x[0])  # float
    x.cpu()  # copy
    x.nonzero()  # nonzero
    str(x)  # print
    torch.equal(x, x)  # equal
    torch.tpu.synchronize()  # synchronize
    x[torch.tensor([0], device="tpu")]  # index
    assert sorted(events("syncs")) == sorted(
        [
            ("item", line("item"), 3),
            ("bool", line("bool"), 1),
            ("item", line("float"), 1),
            ("copy to the host", line("copy"), 1),
            ("size that depends on data", line("nonzero"), 1),
            ("print", line("print"), 1),
            ("equal", line("equal"), 1),
            ("synchronize", line("synchronize"), 1),
            ("check of an index or argument", line("index"), 1),
        ]
    )
    assert metrics.counters()["sync::item"] == 5  # what is a condition is only told apart by its line
    assert f"3 × item  at {line('item')}  x[2].item()  # item" in metrics.report(10**6)


def test_flushes_have_their_cause_line_and_count():
    x = torch.ones(3, device="tpu")
    with torch.tpu.set_eager_mode(FUSED):
        torch.tpu.synchronize()
        metrics.reset()
        for _ in range(2):
            (x + 1).sum().item()  # flush by item
        y = x * 2
        torch.tpu.synchronize()  # flush by synchronize
        for _ in range(200):
            y = y + 1  # flush by length
        z = y.sin()
        with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):  # flush by mode
            z.tolist()
    assert sorted(events("flushes")) == sorted(
        [
            ("item", line("flush by item"), 2),
            ("synchronize", line("flush by synchronize"), 1),
            ("grown long", line("flush by length"), 2),
            ("mode", line("flush by mode"), 1),
        ]
    )


# --- fallbacks ---------------------------------------------------------------------------------------------------


def test_fallbacks_have_their_reason_and_line(monkeypatch):
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    x = torch.rand(4, device="tpu")
    torch.histc(x, 4)
    torch_tpu.eager.host.fallback.run_on_cpu(torch.ops.aten.sin.default, (x,), {}, "for the test")  # fallback
    (event,) = metrics.snapshot()["fallbacks"]
    assert (event["what"], event["detail"], event["line"]) == ("aten::sin", "for the test", line("fallback"))
    assert metrics.counters()["fallback::aten::sin"] == 1
    assert ("operator on the CPU", line("fallback"), 1) in events("syncs")


# --- the form ----------------------------------------------------------------------------------------------------


def test_the_snapshot_is_json():
    nn.functional.relu(torch.ones(9, device="tpu")).sum().item()
    read: dict[str, Any] = json.loads(json.dumps(metrics.snapshot()))
    assert list(read) == ["counters", "recompiles", "graphs", "graph_breaks", "syncs", "flushes", "fallbacks", "hosted"]
    assert read["counters"]["sync::item"] == 1


def test_the_report_shows_the_first_entries_of_each_kind():
    x = torch.ones(2, device="tpu")
    metrics.reset()
    exec("\n".join(["x[0].item()"] * 12), {"x": x})
    text = metrics.report(most=5)
    assert text.count("1 × item") == 5
    assert "and 7 more (report(most=…), snapshot())" in text


def test_reset_forgets_counts_but_not_programs():
    torch.special.entr(torch.ones(3, device="tpu"))
    metrics.reset()
    assert metrics.snapshot()["recompiles"] == []
    assert metrics.counters() == {}
    torch.special.entr(torch.ones(4, device="tpu"))
    assert [reason for reason, _ in recompiles("special_entr")] == ["shape of self: [3] → [4]"]


def test_the_cache_functions_of_torch_tpu():
    x = torch.ones(5, 2, device="tpu")
    x.sinc()
    metrics.reset()
    x.sinc()
    torch.ones(5, 37, device="tpu").sinc()
    stats = torch.tpu._get_cache_stats()
    assert stats["requests"] == stats["hits"] + stats["misses"] == torch.tpu._get_cache_requests()
    assert (torch.tpu._get_cache_hits() >= 1, torch.tpu._get_cache_misses()) == (True, 2)  # ones and sinc
    torch.tpu._clear_cache()
    metrics.reset()
    x.sinc()
    assert (torch.tpu._get_cache_hits(), torch.tpu._get_cache_misses()) == (0, 1)
