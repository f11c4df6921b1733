"""Which XLA options programs get on XLA:CPU, and that results don't depend on them but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_tpu import metrics
from torch_tpu.runtime.client import client_errors
from torch_tpu.runtime.cpu_options import options_for
from torch_tpu.runtime.disk_cache import DiskCache
from torch_tpu.runtime.process_client import client

YNN = "xla_cpu_experimental_ynn_fusion_type"
LEVEL = "xla_backend_optimization_level"


def test_small_programs_are_compiled_cheaply() -> None:
    tiny = {("parameter", (8, 8)): 1, ("exponential", (8, 8)): 1}
    assert options_for(tiny)[LEVEL] == 0
    assert LEVEL not in options_for({**tiny, ("while", (8, 8)): 1})
    assert LEVEL not in options_for({("parameter", (64, 64)): 1, ("reduce", (64,)): 1})
    assert not options_for({**tiny, ("power", (8, 8)): 1})
    assert not options_for({**tiny, ("modulus", (8, 8)): 1})
    assert not options_for({("parameter", (64, 65)): 1, ("reduce", (64,)): 1})


def test_barriers_decide_nothing() -> None:
    large = (1024, 1024)
    hidden = {("optimization_barrier", large): 1}
    for operations in ({("parameter", large): 2, ("divide", large): 1}, {("convert", large): 1}):
        assert options_for({**operations, **hidden}) == options_for(operations) != {}


def test_small_programs_do_not_simplify_quotients_at_last() -> None:
    divided = {("parameter", (8, 8)): 1, ("divide", (8, 8)): 1}
    assert options_for(divided)["xla_disable_hlo_passes"] == "simplification after layout assignment"
    both = options_for({**divided, ("bfloat16_dot", (8, 8)): 1})["xla_disable_hlo_passes"]
    assert both == "simplification after layout assignment,transpose-folding"


def test_transposes_are_not_folded_into_products_of_bfloat16() -> None:
    product = {("parameter", (64, 65)): 2, ("transpose", (65, 64)): 1}
    assert options_for({**product, ("bfloat16_dot", (65, 65)): 1}) == {"xla_disable_hlo_passes": "transpose-folding"}
    assert not options_for({**product, ("dot_general", (65, 65)): 1})


def test_what_ynn_computes() -> None:
    large, image = (1024, 1024), (16, 64, 32, 32)
    assert YNN in options_for({("parameter", large): 2, ("add", large): 1})
    assert YNN in options_for({("parameter", large): 2, ("divide", large): 1})
    assert YNN not in options_for({("parameter", large): 2, ("maximum", large): 1})
    root = {("parameter", large): 1, ("sqrt", large): 1, ("constant", large): 1, ("add", large): 1}
    assert YNN in options_for(root)
    assert YNN not in options_for({**root, ("divide", large): 1})
    assert YNN not in options_for({("parameter", large): 2, ("add", large): 1, ("multiply", large): 1})
    scaled = {("broadcast_in_dim", image): 2, ("multiply", image): 1, ("add", image): 1, ("sqrt", (64,)): 1}
    assert YNN in options_for({("parameter", image): 1, **scaled})
    assert YNN not in options_for({("parameter", large): 1, **scaled, ("broadcast_in_dim", large): 1})


DOUBLED = """module @m {{ func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
  %y = stablehlo.{} %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}} }}"""


@pytest.mark.parametrize("lacking", [{"xla_cpu_of_a_later_version": True}, {"xla_cpu_scheduler_type": "A_LATER_ONE"}])
@pytest.mark.parametrize("folder", ["", "cache"])
def test_a_compiler_of_another_version_gets_the_options_it_has(
    lacking: dict[str, str | bool], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path / folder) if folder else None
    monkeypatch.setattr(client(), "disk_cache", cache)
    monkeypatch.setattr(client(), "_unknown_options", set())
    wanted = {LEVEL: 0, **lacking}
    for name, expected in (("add", [0.0, 2.0, 4.0, 6.0]), ("multiply", [0.0, 1.0, 4.0, 9.0])):
        for _ in range(2):  # compiled, then read from the disk
            program = client().compile(DOUBLED.format(name).encode(), [((4,), np.float32)], wanted)
            got = client().get(program([client().put(np.arange(4, dtype=np.float32))])[0])
            assert got.tolist() == expected
            del program
    assert client()._unknown_options == set(lacking)
    assert (metrics.counters().get("disk_cache_hit", 0), metrics.counters()["compile"]) == ((2, 2) if cache else (0, 4))


def test_other_refusals_of_the_compiler_are_errors() -> None:
    with pytest.raises(client_errors(), match="no_such_operation"):
        client().compile(DOUBLED.format("no_such_operation").encode(), [((4,), np.float32)], {LEVEL: 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.tanh, torch.sqrt, torch.neg, F.gelu, lambda x: x + x, lambda x: x / 3, lambda x: x.softmax(1)],
)
def test_rows_of_a_large_program_equal_those_of_a_small_one(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    rows = torch.randn(130, 64).to(dtype)
    rows[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-3])
    whole = function(rows.to("tpu")).cpu()
    for count in (2, 40):
        part = function(rows[:count].clone().to("tpu")).cpu()
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(part, whole[:count], rtol=rounding, atol=0, equal_nan=True)
