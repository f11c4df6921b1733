"""docs/operators.md says what the device does: it is not stale, coverage never falls, and a sample of it is true."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import torch_tpu
from tools.operators import page, reach
from tools.operators.__main__ import app
from tools.operators.reach import Answer, Kind
from torch_tpu import metrics

# A derived form of PyTorch's own composite operator is written nowhere here.
WRITTEN_HERE = (Kind.LOWERING, Kind.KERNEL, Kind.DECOMPOSITION)
PACKAGE = Path(torch_tpu.__file__).parent
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "operators.md"


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return reach.answers()


@pytest.fixture(scope="module")
def text() -> str:
    text = DOCUMENT.read_text()
    version = re.search(r"dispatcher of PyTorch (\S+) knows", text)
    assert version is not None
    if version[1] != torch.__version__.partition("+")[0]:
        pytest.skip(f"the document describes PyTorch {version[1]}, not {torch.__version__}")
    return text


def lost(written: dict[str, Kind], now: dict[str, Kind]) -> list[str]:
    """Overloads that a document says the device answers by itself, and that it doesn't answer now."""
    return [name for name, kind in written.items() if kind.is_answered and name in now and not now[name].is_answered]


def kinds(answers: dict[str, Answer]) -> dict[str, Kind]:
    return {name: answer.kind for name, answer in answers.items()}


def test_coverage_never_falls(answers: dict[str, Answer], text: str) -> None:
    gone = {name: answers[name].reason for name in lost(page.read(text), kinds(answers))}
    assert gone == {}, "the device answered these by itself; if they must go, say why in the commit and regenerate"


def test_document_is_fresh(answers: dict[str, Answer], text: str) -> None:
    written = page.totals(page.read(text))
    assert written == page.totals(kinds(answers)), f"docs/operators.md is stale; run `{page.COMMAND}`"


def test_document_names_the_files(answers: dict[str, Answer], text: str) -> None:
    """From the page it is one click to the file of any operator that is answered here."""
    written = page.read_files(text)
    assert written == page.files(answers), f"docs/operators.md is stale; run `{page.COMMAND}`"
    missing = [file for named in written.values() for file in named if not (PACKAGE / file).is_file()]
    assert missing == []
    here = {name.partition(".")[0] for name, answer in answers.items() if answer.kind in WRITTEN_HERE}
    assert here - set(written) == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tan", '"tan": hlo.tan'),  # registered in a loop over functions of the StableHLO builder
        ("add", '"add.Tensor"'),
        ("_foreach_add", '"add.Tensor"'),  # derived
        ("avg_pool2d", "avg_pool{_spatial}d"),
        ("nonzero", '@kernel("nonzero")'),
    ],
)
def test_the_file_has_the_operator(name: str, said: str, text: str) -> None:
    named = page.read_files(text)[name]
    assert any(said in (PACKAGE / file).read_text() for file in named), named


def test_page_says_what_it_was_given(answers: dict[str, Answer]) -> None:
    assert page.read(page.page(answers)) == kinds(answers)


def test_command_writes_the_page(answers: dict[str, Answer], tmp_path: Path) -> None:
    output = tmp_path / "operators.md"
    assert CliRunner().invoke(app, ["--output", str(output)]).exit_code == 0
    assert output.read_text() == page.page(answers)


def test_a_loss_is_seen() -> None:
    written = {"add.Tensor": Kind.LOWERING, "mul.Tensor": Kind.LOWERING, "ldl": Kind.FALLBACK}
    now = {"add.Tensor": Kind.FALLBACK, "mul.Tensor": Kind.COMPOSITE, "ldl": Kind.NOT_POSSIBLE}
    assert lost(written, now) == ["add.Tensor"]


def test_every_overload_is_judged(answers: dict[str, Answer]) -> None:
    assert len(answers) > 3000
    unknown = {n: a.reason for n, a in answers.items() if "no arguments are known" in a.reason}
    assert unknown == {}, "give these a line in tools.operators.examples.CALLS"


def run(name: str) -> dict[str, float]:
    """Really runs a small call of an overload on the device; returns which operators went to the CPU."""
    func = reach.overload(name)
    before = metrics.counters()
    for example in reach.examples_of(func):
        try:
            reach.call(func, example, "cpu")
        except Exception as error:
            if "Could not run" not in str(error):
                continue
        with torch.no_grad():
            reach.call(func, example, "tpu")
        after = metrics.counters()
        return {k: v for k, v in after.items() if k.startswith("fallback::") and v != before.get(k, 0)}
    raise AssertionError(f"no arguments are known for {name}")


SAMPLE = {
    Kind.LOWERING: ["add.Tensor", "mm", "sort.stable", "_softmax", "index_select"],
    Kind.DERIVED: ["add_.Tensor", "sort.values_stable", "mm.out", "_foreach_add.List", "_foreach_sqrt_"],
    Kind.KERNEL: ["nonzero", "unique_dim", "masked_select", "lstm.input"],
    Kind.VIEW: ["transpose.int", "expand", "unsqueeze", "view_as_real"],
    Kind.DECOMPOSITION: [
        "_add_relu.Tensor",
        "slow_conv_dilated2d",
        "_slow_conv2d_backward.output_mask",
        "_transform_bias_rescale_qkv",
    ],
    Kind.TORCH_DECOMPOSITION: ["linalg_cross", "pixel_shuffle", "trace", "renorm", "diagonal_scatter"],
    Kind.COMPOSITE: [
        "einsum",
        "istft",
        "quantile",
        "stft",
        "linalg_norm",
        "celu",
        "var.out",
        "convolution_backward",
    ],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in SAMPLE.items() for name in names])
def test_answered_means_not_on_the_cpu(
    kind: Kind, name: str, answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers[name].kind is kind
    monkeypatch.setitem(os.environ, "TORCH_TPU_FALLBACK", "error")
    assert run(name) == {}


def test_fallback_means_on_the_cpu(answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers["_reshape_from_tensor"].kind is Kind.FALLBACK
    monkeypatch.setitem(os.environ, "TORCH_TPU_FALLBACK", "allow")
    name = "fallback::aten::_reshape_from_tensor"
    before = metrics.counters().get(name, 0)
    torch._reshape_from_tensor(torch.zeros(4, device="tpu"), torch.tensor([2, 2], device="tpu"))
    assert metrics.counters()[name] == before + 1


@pytest.mark.parametrize("name", ["_to_sparse", "_to_sparse_csr", "crow_indices", "_coalesce", "cudnn_grid_sampler"])
def test_not_possible_means_an_error(name: str, answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers[name].kind is Kind.NOT_POSSIBLE
    monkeypatch.setitem(os.environ, "TORCH_TPU_FALLBACK", "allow")
    x = torch.eye(2, device="tpu")
    with pytest.raises((NotImplementedError, RuntimeError), match=r"sparse|not implemented for the tpu device"):
        reach.overload(name)(*([x, x] if name == "cudnn_grid_sampler" else [x]))
