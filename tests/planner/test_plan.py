"""Plans of small scripts for an ahead-of-time target: what they say against figures worked out by hand."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

CLI = ("-c", "from torch_tpu.cli import app; app()")

TRAINING = """
import sys
import torch

batch = int(sys.argv[sys.argv.index("--batch") + 1])
model = torch.nn.Linear(256, 100, device="tpu", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("tpu")
while True:
    x = torch.randn(batch, 256).to("tpu", torch.bfloat16)
    loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    loss.item()
"""

# What people write around a training loop. The losses of a plan must not end it, and its checkpoint is not one.
EPOCHS = """
import argparse, math, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from width import WIDTH

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    given = parser.parse_args()
    data = TensorDataset(torch.randn(12, 256), torch.randint(0, WIDTH, (12,)))
    model = torch.nn.Linear(256, WIDTH).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(given.epochs):
        model.train()
        for x, y in DataLoader(data, batch_size=4):
            loss = torch.nn.functional.cross_entropy(model(x.to("tpu")), y.to("tpu"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if math.log(loss.item()) < -3:
                sys.exit("it has learnt everything")
            break
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=4):
                right = (model(x.to("tpu")).argmax(1).cpu() == y).sum()
        torch.save(model.state_dict(), Path(__file__).with_name("best.pt"))

if __name__ == "__main__":
    main()
"""

# Prints the keys of programs as a topology names them, and as a machine with the TPU would, which names no operators.
KEYS = """
import torch
from torch_tpu import hooks
from torch_tpu.planner.recorder import Record
from torch_tpu.runtime.client import Client
from torch_tpu.runtime.process_client import client

def keys():
    hooks.forget_programs()
    client().listener = record = Record()
    x = torch.randn(16, 16, device="tpu")
    (x @ x + 1).sum().item()
    return sorted(run.program.key for run in record.runs)

named = keys()
kind = type(client())
kind.names_operators, kind._key = False, Client._key
assert named and named == keys(), (named, keys())
"""

INFERENCE = """
import torch
import torch_tpu

model = None

def step(x):
    global model
    if model is None:
        model = torch.nn.Linear(128, 128, device="tpu")
    kept = x.to("tpu")
    y = model(kept)
    found = torch.nonzero(y)                     # as many rows as there are elements
    torch.linalg.eigvals(y)                      # on the CPU: y there and the result back
    return found.shape

with torch.no_grad():
    plan = torch_tpu.plan(step, torch.zeros(128, 128), target="v5e:1x1", steps=2)
print(plan.to_json())
assert torch_tpu.planner.Plan.from_json(plan.to_json()) == plan
"""


def run(*command, environment=None):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_training_is_planned_saved_and_shown(tmp_path):
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    code, out, err = run(
        *(*CLI, "plan", str(script), "--batch", "32", "--target", "v5e:1x1"),
        *(
            "--json",
            str(tmp_path / "plan.json"),
            "--html",
            str(tmp_path / "plan.html"),
            "--save",
            str(tmp_path / "saved"),
        ),
        environment={"TORCH_TPU_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"},
    )
    assert code == 0, err
    plan = json.loads((tmp_path / "plan.json").read_text())
    parts = plan["memory"]["parts"]
    # The weight lies as 104 rows of 256 in bfloat16, the bias takes a tile; old and new values may lie side by side.
    laid_out = 104 * 256 * 2 + 512
    assert laid_out <= parts["parameters"] <= 2 * laid_out
    assert laid_out <= parts["optimizer state"] <= 2 * laid_out
    assert laid_out <= parts["gradients"] <= 2 * laid_out
    assert plan["fits"]
    assert plan["memory"]["limit"] == int(15.75 * 2**30)
    # x @ w.T, and its gradient by w; nothing needs the gradient by x.
    products = 2 * 2 * 32 * 256 * 100
    assert products <= plan["flops"] < 1.5 * products
    assert (plan["step"], plan["steps"], plan["samples"]) == ("training step", 3, 32)
    assert plan["seconds"] > 0
    assert any(o["line"] == f"{script}:11" and o["operator"] == "addmm" for o in plan["operations"])
    # GradScaler reads whether a gradient was infinite, which must read as no; then the loss is read.
    assert sorted((w["line"], w["count"]) for w in plan["waits"]) == [(f"{script}:13", 1), (f"{script}:16", 1)]
    assert "not measured" in out or "nothing was measured" in out
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    saved = [p.name for p in (tmp_path / "saved").glob("*/*.executable")]
    assert saved
    assert all((tmp_path / "cache" / name[:2] / name).exists() for name in saved)


def test_a_loop_with_evaluation_checkpoints_and_an_early_end_is_planned_unchanged(tmp_path):
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS)
    (tmp_path / "width.py").write_text("WIDTH = 128\n")
    (tmp_path / "best.pt").write_text("weights of a real run")
    code, _, err = run(
        *(*CLI, "plan", str(script), "--target", "v5e:1x1", "--json", str(tmp_path / "plan.json"), "--epochs", "50"),
        environment={"TORCH_TPU_CACHE_DIR": ""},
    )
    assert code == 0, err
    assert (tmp_path / "best.pt").read_text() == "weights of a real run"
    assert f"torch-tpu plan does not write {tmp_path / 'best.pt'}: its tensors have placeholder values" in err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["step"], plan["steps"], plan["ended"], plan["samples"]) == ("training step", 3, "after 3 steps", 4)
    # Forward and the gradient by the weight of 4 rows, without the evaluation between the steps.
    products = 2 * 2 * 4 * 256 * 128
    assert products <= plan["flops"] < 1.5 * products
    assert not plan["waits"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\nimport torch\nsys.exit('usage: script DATA')\n", "usage: script DATA\n"),
        (
            "import torch\ntorch.ones(2, device='tpu') @ torch.ones(3, device='tpu')\n",
            'Traceback (most recent call last):\n  File "{script}", line 2, in <module>\n    torch.ones(2',
        ),
    ],
)
def test_a_script_that_fails_shows_its_own_error(tmp_path, text, said):
    script = tmp_path / "failing.py"
    script.write_text(text)
    code, out, err = run(*CLI, "plan", str(script), "--target", "v5e:1x1")
    assert (code, out) == (1, "")
    assert err.startswith(said.format(script=script))


def test_a_machine_with_the_tpu_looks_for_the_same_programs():
    code, _, err = run("-c", KEYS, environment={"TORCH_TPU_PLATFORM": "v5e:1x1", "TORCH_TPU_CACHE_DIR": ""})
    assert code == 0, err


def test_inference_sizes_that_depend_on_data_and_the_cpu(tmp_path):
    code, out, err = run("-c", INFERENCE, environment={"TORCH_TPU_CACHE_DIR": "", "TORCH_TPU_FALLBACK": "allow"})
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["step"], plan["steps"]) == ("call", 2)
    # The product; finding what is not zero counts elements a few hundred times.
    assert 2 * 128**3 <= plan["flops"] < 3 * 2 * 128**3
    assert plan["memory"]["parts"]["parameters"] >= 128 * 129 * 4
    fallbacks = [w for w in plan["waits"] if w["fallback"]]
    assert [(w["count"], w["bytes"]) for w in fallbacks] == [(1, 128 * 128 * 4)]
    assert any("runs on the CPU" in sentence for sentence in plan["advice"])


def test_too_much_is_a_result_and_no_crash(tmp_path):
    script = tmp_path / "large.py"
    script.write_text(
        "import torch\nx = torch.zeros(40, 2**30, dtype=torch.bfloat16, device='tpu')\nprint((x * 2).sum().item())\n"
    )
    code, out, err = run(*(*CLI, "plan", str(script), "--target", "v5e:1x1"), environment={"TORCH_TPU_CACHE_DIR": ""})
    assert code == 2, err
    needs = re.search(r"does not fit: needs ([\d.,]+) of 15\.75 GiB", out)
    assert needs is not None, out
    # 40 × 2³⁰ numbers of two bytes, and not twice as much: the sum reads them in place.
    assert 80 <= float(needs[1].replace(",", "")) < 160


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([], "--target: '' is not a TPU slice. Give one such as v5e:2x2."),
        (["--target", "cpu"], "--target: 'cpu' is not a TPU slice. Give one such as v5e:2x2."),
        (["--target", "v5e:2"], "--target: TORCH_TPU_PLATFORM='v5e:2': the chips of a v5e form a 2-dimensional torus"),
    ],
)
def test_a_plan_needs_a_target(target, said):
    code, _, err = run(*CLI, "plan", __file__, *target)
    assert code == 2
    assert said in err


def test_a_script_that_leaves_the_device_alone_has_no_plan(tmp_path):
    script = tmp_path / "host.py"
    script.write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    code, _, err = run(*CLI, "plan", str(script), "--target", "v5e:1x1")
    assert code == 1
    assert err == f"{script}: nothing ran on the device 'tpu', so there is nothing to plan\n"


def test_a_file_that_can_not_be_written_loses_no_plan(tmp_path):
    script = tmp_path / "small.py"
    script.write_text("import torch\nprint(torch.ones(8, 8, device='tpu').sum().item())\n")
    missing = tmp_path / "missing" / "plan.json"
    code, out, err = run(*CLI, "plan", str(script), "--target", "v5e:1x1", "--json", str(missing))
    assert code == 1
    assert "fits: " in out
    assert "can't be written (No such file or directory)" in " ".join(err.split())
