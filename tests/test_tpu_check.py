"""A slice of `make tpu-check`: an operator of each family compiles for TPUs, none is left to the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conformance import pool
from tests.conformance.database import Entry
from tests.tpu_check import compile as compiling
from tests.tpu_check import lower, report, results
from tests.tpu_check.compile import TARGETS, Batch, Verdict
from torch_tpu.eager import execute, plan
from torch_tpu.runtime.fingerprint import bytecode

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
from tests.tpu_check.compile import Batch, Compile
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
    monkeypatch.setattr(execute, "_plans", execute.Recent(4096))
    monkeypatch.setattr(execute, "make_plan", lambda call: made.append(plan.make_plan(call)) or made[-1])
    torch.linalg.qr(torch.ones(3, 3, device="tpu"))
    refused.write_bytes(next(bytecode(p.module) for p in made if p.custom_calls))
    good, bad = compiled(tmp_path, [[TARGETS[0], programs], [TARGETS[1], [programs[0], "refused"]]])
    assert good == ""
    assert "lapack_sgeqrf_ffi" in bad


def test_what_is_refused_is_found_by_halves(monkeypatch, tmp_path):
    asked = []

    def run(batches, job, *, workers):
        for batch in batches:
            asked.append(len(batch.digests))
            if "crashes" in batch.digests:
                yield batch, {"failures": [{"message": "the process ended"}]}
            else:
                yield batch, {"reason": "no" if "refused" in batch.digests else ""}

    monkeypatch.setattr(pool, "run", run)
    digests = [*"abcdef", "refused", "crashes"]
    found = [v for vs in compiling.verdicts([Batch("t", tuple(digests))], tmp_path, tmp_path, 1) for v in vs]
    reasons = {"refused": "no", "crashes": "the process ended"}
    assert sorted(found) == sorted(Verdict(d, "t", reasons.get(d, "")) for d in digests)
    assert asked == [8, 4, 4, 2, 2, 1, 1]


def test_the_page_says_what_compiles_and_what_does_not():
    entry = Entry("svd", "", "float64")
    lowered = lower.Lowered(2, {"a": "mul", "b": "sum"}, {"svd": "none | at all"}, [])
    summary = report.Summary([results.Result(entry, 2, lowered)], {("a", "t"): "", ("b", "t"): "no\nmore"}, ["t"])
    text = report.page(summary)
    assert "| float64 | 1 | 1 | 2 | 1 (50.0 %) |" in text
    assert "| `svd` | float64 | none ¦ at all |" in text
    assert "| `sum` | float64 | no |" in text
