"""Equal parts of a graph are found, handled once and called N times; results and gradients stay what they are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from torch_tpu import compile as tpu_compile
from torch_tpu import metrics
from torch_tpu.compile.layers import outline, repetition
from torch_tpu.compile.layers.repetition import repeated


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    def __init__(self, size: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + F.dropout(F.gelu(self.out(a.transpose(1, 2).flatten(-2))), self.dropout)


class Model(nn.Module):
    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(count))
        self.head = nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(ids), torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril().bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def captured(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    graphs = []
    torch.compile(function, backend=lambda graph, examples: graphs.append(graph) or graph.forward)(*args)
    return graphs[0]


def outlined() -> float:
    return metrics.counters().get("repetition_outlined", 0)


def test_a_graph_before_and_after() -> None:
    model, ids = Model(5).to("tpu"), torch.zeros(2, 4, dtype=torch.long, device="tpu")
    graph = captured(model, ids)
    parts = repeated(graph.graph)
    assert len(parts) == 5
    assert {len(p.nodes) for p in parts} == {len(parts[0].nodes)}
    for part, following in itertools.pairwise(parts):
        assert len(part.outputs) == 1  # the residual stream
        assert part.outputs[0] in following.inputs
        assert len(part.inputs) == 8  # that, the mask and six parameters
    after, region = outline.outline(graph)
    assert region is not None
    targets = [n.target for n in after.graph.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.torch_tpu.region.default) == 5
    assert F.layer_norm not in targets
    assert len(targets) < len(graph.graph.nodes) / 3


def test_a_program_has_one_function_for_all_copies() -> None:
    model, ids = Model(6).to("tpu"), torch.zeros(2, 4, dtype=torch.long, device="tpu")
    shown = tpu_compile.debug(model, ids)
    assert len(shown.programs) == 2
    for program in shown.programs:
        assert program.stablehlo.count("func.func private") == 1
        assert program.stablehlo.count("= call @") + program.stablehlo.count("= func.call @") == 6
    products = shown.programs[0].stablehlo.count("stablehlo.dot_general")
    assert products == 5  # qkv, two in attention, out; and the head


def test_no_more_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of weights and activations are made again, not kept beside them."""
    model, ids = Model(5).to("tpu"), torch.zeros(2, 4, dtype=torch.long, device="tpu")
    together = tpu_compile.debug(model, ids).programs
    monkeypatch.setattr(repetition, "LEAST_COPIES", 99)
    apart = tpu_compile.debug(model, ids).programs
    assert apart[0].stablehlo.count("func.func private") == 0
    # Each part is partitioned by itself, so a statistic more may be kept; a second copy of a weight may not.
    weight = model.layers[0].qkv.weight.nbytes
    assert together[0].analysis.output_bytes < apart[0].analysis.output_bytes + 5 * weight / 4
    assert together[1].analysis.output_bytes == apart[1].analysis.output_bytes


@pytest.mark.parametrize("frozen", [False, True])
def test_training_equals_the_cpu(frozen: bool) -> None:
    torch.manual_seed(0)
    host = Model(5)
    if frozen:
        host.embed.requires_grad_(False)
        host.layers[1].requires_grad_(False)
        host.layers[3].norm.requires_grad_(False)
    device = copy.deepcopy(host).to("tpu")
    ids = torch.randint(0, 10, (2, 4))
    step = torch.compile(device, fullgraph=True)
    before = outlined()
    for _ in range(2):
        want, got = host(ids), step(ids.to("tpu"))
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert outlined() - before == (0 if frozen else 5)
    for (name, p), q in zip(host.named_parameters(), device.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q[1].grad.cpu(), p.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_without_gradients_and_in_the_other_mode() -> None:
    torch.manual_seed(0)
    host = Model(4)
    device, ids = copy.deepcopy(host).to("tpu"), torch.randint(0, 10, (2, 4))
    before = outlined()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(device)(ids.to("tpu")).cpu(), host(ids), rtol=1e-4, atol=1e-5)
    assert outlined() - before == 4
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE), torch.no_grad():
        torch.testing.assert_close(torch.compile(device)(ids.to("tpu")).cpu(), host(ids), rtol=1e-4, atol=1e-5)


def test_copies_draw_different_random_numbers_the_same_as_eager() -> None:
    model, ids = Model(4, dropout=0.5).to("tpu"), torch.zeros(2, 4, dtype=torch.long, device="tpu")
    results = []
    before = outlined()
    for function in (model, torch.compile(model)):
        torch.manual_seed(7)
        model.zero_grad()
        value = function(ids)
        value.square().sum().backward()
        results.append([value.detach(), torch.rand(2, device="tpu"), *(p.grad.clone() for p in model.parameters())])
    assert outlined() - before == 4
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def test_autocast_on_the_way_is_respected() -> None:
    torch.manual_seed(0)
    model, ids = Model(4).to("tpu"), torch.zeros(2, 4, dtype=torch.long, device="tpu")

    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu", torch.bfloat16):
            return model(ids)

    assert repeated(captured(run, ids).graph) == []
    want, got = run(ids), torch.compile(run)(ids)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2)


def test_only_what_is_equal_is_a_copy() -> None:
    x = torch.ones(4, device="tpu")

    def different(x: torch.Tensor) -> torch.Tensor:
        for i in range(6):
            x = torch.tanh(torch.sin(x * (i + 0.5)).cos().exp() + x).abs()
        return x

    def equal(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(torch.sin(x * 0.5).cos().exp() + x).abs()
        return x

    assert repeated(captured(different, x).graph) == []
    assert len(repeated(captured(equal, x).graph)) == 6
    torch.testing.assert_close(torch.compile(equal)(x).cpu(), equal(x.cpu()))
