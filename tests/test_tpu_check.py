"""A slice of `make tpu-check`: an operator of each family compiles for TPUs, none is left to the CPU."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.conformance import pool
from tools.conformance.database import Entry
from tools.tpu_check import compile as compiling
from tools.tpu_check import lower, report, results
from tools.tpu_check.compile import TARGETS, Batch, Verdict
from torch_tpu.eager.program import plan_table, plan_tracing
from torch_tpu.recent import Recent
from torch_tpu.runtime.fingerprint import bytecode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tpu-operators.md"
ENTRIES = (
    *(
        Entry(name, "", "float32")
        for name in (
            "cumsum",
            "fft.rfft",
            "linalg.cholesky",
            "linalg.eigh",
            "linalg.lu_factor",
            "linalg.qr",
            "nn.functional.conv2d",
            "nn.functional.max_pool2d",
            "nn.functional.scaled_dot_product_attention",
            "sort",
            "topk",
        )
    ),
    Entry("scatter_reduce", "amax", "float32"),
    Entry("special.bessel_j0", "", "float64"),
    Entry("fft.fft", "", "complex64"),
    Entry("floor_divide", "", "int64"),
    Entry("nn.functional.layer_norm", "", "bfloat16"),
    Entry("nn.LSTM", "train", "float32", "module"),
    Entry("AdamW", "fused", "float32", "optimizer"),
)

COMPILE = """
import json, sys
from pathlib import Path
from tools.tpu_check.compile import Batch, Compile
compile = Compile(Path(sys.argv[1]))
print(json.dumps([compile(Batch(target, tuple(digests)))["reason"] for target, digests in json.loads(sys.argv[2])]))
"""


def compiled(folder, batches):
    """Reasons, from a process of its own: libtpu changes how its process treats signals."""
    command = [sys.executable, "-c", COMPILE, str(folder), json.dumps(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(1200)  # libtpu's compiler takes a dozen seconds of one core
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_an_operator_of_each_family_compiles_for_tpus(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_PLATFORM", "cpu")
    programs = []
    for entry in ENTRIES:
        outcome = lower.run(entry, samples=1, folder=tmp_path)
        assert outcome["samples"] == 1, entry
        assert outcome["programs"], entry
        assert (outcome["fallbacks"], outcome["failures"]) == ({}, []), entry
        programs += outcome["programs"]
    # What has no form for TPUs is no program of theirs; XLA:CPU's own is refused.
    refused = tmp_path / "refused"
    made = []
    monkeypatch.setattr(plan_table, "plans", Recent(4096))
    trace = plan_tracing.make_plan
    monkeypatch.setattr(plan_tracing, "make_plan", lambda call: made.append(trace(call)) or made[-1])
    torch.linalg.qr(torch.ones(3, 3, device="tpu"))
    refused.write_bytes(next(bytecode(p.module) for p in made if p.custom_calls))
    good, bad = compiled(tmp_path, [[TARGETS[0], programs], [TARGETS[1], [programs[0], "refused"]]])
    assert good == ""
    assert "lapack_sgeqrf_ffi" in bad


@pytest.mark.parametrize("entry", [Entry("linalg.eig", "", "float32"), Entry("linalg.eigvals", "", "float32")], ids=str)
def test_the_page_lists_what_runs_on_the_cpu(entry, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_PLATFORM", "cpu")
    fallbacks = lower.run(entry, samples=1, folder=tmp_path)["fallbacks"]
    assert fallbacks
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {(row[0], row[2]): row[1].split(", ") for row in rows}
    for operator, reason in fallbacks.items():
        assert entry.dtype in listed[f"`{operator}`", reason]


def test_the_page_has_no_program_that_the_compiler_refuses():
    text = PAGE.read_text()
    assert "## What fails" not in text
    assert "100.0 %" in text


def test_what_is_refused_or_takes_too_long_is_found_by_parts(monkeypatch, tmp_path):
    asked = []

    def run(batches, job, *, workers):
        for batch in batches:
            asked.append(len(batch.digests))
            if "endless" in batch.digests:
                yield batch, {"failures": [{"message": f"the process ended with code -{signal.SIGXCPU.value}"}]}
            elif "crashes" in batch.digests:
                yield batch, {"failures": [{"message": "the process ended"}]}
            else:
                yield batch, {"reason": "no" if "refused" in batch.digests else "", "processor": 2.5}

    monkeypatch.setattr(pool, "run", run)
    digests = ["refused", "crashes", *map(str, range(97)), "endless"]
    found = [v for vs in compiling.verdicts([Batch("t", tuple(digests))], tmp_path, tmp_path, 1) for v in vs]
    reasons = {
        "refused": "no",
        "crashes": "the process ended",
        "endless": f"compiling it takes more than {compiling.SECONDS_ALONE} s of a processor's time",
    }
    assert {v.digest: v.reason for v in found} == {d: reasons.get(d, "") for d in digests}
    assert asked == [100, *[13] * 7, 9, *[2] * 6, 1, *[2] * 4, 1, 1, 1]
    assert next(v.seconds for v in found if v.digest == "refused") == 2.5


def test_a_program_that_takes_too_long_ends_its_process(tmp_path):
    (tmp_path / "a").touch()
    code = f"""
from pathlib import Path
from unittest import mock
from tools.tpu_check import compile as compiling
compiling.SECONDS_ALONE = 1
def forever(programs):
    while True:
        pass
with mock.patch.object(compiling, "_client"), mock.patch.object(compiling, "join", forever):
    compiling.Compile(Path({str(tmp_path)!r}))(compiling.Batch("t", ("a",)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=600)
    assert done.returncode == -signal.SIGXCPU.value


def test_programs_that_differ_in_name_alone_are_one():
    text = "module @{} {{\n  func.func public @main() {{\n    return{}\n  }}\n}}\n"
    assert lower.digest_of(text.format("add", "")) == lower.digest_of(text.format('"sum of squares"', ""))
    assert lower.digest_of(text.format("add", "")) != lower.digest_of(text.format("add", " %0"))


def test_the_page_says_what_compiles_and_what_does_not():
    entries = Entry("svd", "", "float64"), Entry("sum", "", "float64"), Entry("sum", "", "int32")
    lowered = (
        lower.Lowered(2, {"a": "mul", "b": "sum"}, {"svd": "none | at all"}, []),
        lower.Lowered(2, {"b": "sum", "c": "sum"}, {}, []),
        lower.Lowered(1, {"a": "mul", "d": "sum"}, {}, []),
    )
    verdicts = {
        (digest, target): Verdict(digest, target, reason, seconds)
        for digest, target, reason, seconds in (
            ("a", "t", "", 0.0),
            ("b", "t", "no\nmore", 3.0),
            ("c", "t", "", 81.5),
            ("d", "t", "", 3.0),
            ("a", "u", "", 0.0),
        )
    }
    found = [results.Result(e, 2, one) for e, one in zip(entries, lowered, strict=True)]
    text = report.page(report.Summary(found, verdicts, ["t", "u"]))
    assert "| float64 | 2 | 1 | 3 | 2 (66.7 %) | 1 of 1 tried |" in text
    assert "| int32 | 1 | 0 | 2 | 2 (100.0 %) | 1 of 1 tried |" in text
    assert "| all | 3 | 1 | 4 | 3 (75.0 %) | 1 of 1 tried |" in text
    assert "| `svd` | float64 | none ¦ at all |" in text
    assert "| `sum` | float64 | no |" in text
    assert "| `sum` | float64 | 82 s for t |" in text
    assert "at most 2 sample inputs" in text
