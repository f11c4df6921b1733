"""torch_tpu.compile.debug: FX, StableHLO and optimised HLO of a compiled call."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from torch_tpu import compile as tpu_compile


def test_forward_and_backward_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("tpu")
    x = torch.randn(32, 8, device="tpu")
    shown = tpu_compile.debug(model, x)
    assert [p.name.partition(", ")[2] for p in shown.programs] == ["forward", "backward"]
    forward = shown.programs[0]
    assert "torch.ops.aten.tanh.default" in forward.fx
    assert "stablehlo.tanh" in forward.stablehlo
    assert "ENTRY" in forward.hlo
    assert forward.analysis is not None
    assert forward.analysis.argument_bytes >= 4 * (8 * 16 + 16 + 16 * 4 + 4 + 32 * 8)
    torch.testing.assert_close(shown.result, model(x))
    assert model[0].weight.grad is None
    for text in (str(shown), _rendered(shown)):
        assert "backward" in text
        assert "stablehlo" in text


@pytest.mark.jaxlib_cpu("a plug-in need not estimate the cost of a program, and the one tested does not")
def test_the_cost_of_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("tpu")
    shown = tpu_compile.debug(model, torch.randn(32, 8, device="tpu"))
    forward = shown.programs[0].analysis
    assert forward is not None
    # Two products of 32 rows: 2·8·16 and 2·16·4 operations a row, and what is added to them.
    assert 32 * (256 + 128) <= forward.flops < 32 * (256 + 128) * 2
    assert shown.cost["flops"] > forward.flops


def test_what_is_called_twice_is_compiled_twice() -> None:
    x = torch.ones(3, device="tpu")
    for _ in range(2 * torch._dynamo.config.recompile_limit):
        shown = tpu_compile.debug(lambda x: x + 1, x)
        assert len(shown.programs) == 1
    assert "add" in shown.fx


def test_a_graph_without_a_program_says_why() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        shown = tpu_compile.debug(lambda x: torch.nonzero(x).sum(), torch.ones(3, device="tpu"))
    assert "nonzero" in shown.programs[0].reason
    assert "operator by operator" in str(shown)


def _rendered(shown: tpu_compile.inspection.Inspection) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(shown)
    return console.file.getvalue()
