"""Many equal layers share one program, launched for each: few programs, equal values, no more memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.programs import plans_of
from tests.compile.test_autograd_cache import anew, cache  # noqa: F401
from tests.compile.test_outline import Layer, Model
from torch_tpu import metrics
from torch_tpu.compile.layers import layered_program, roofline


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layered_program, "LEAST_SECONDS", 0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layered() -> list[tuple[int, int]]:
    """Layers and different programs of the graphs captured since the last reset of the metrics, and before."""
    return [(g["layers"], g["parts"]) for g in metrics.snapshot()["graphs"]]


def train(model: Callable[..., Tensor], *args: Tensor) -> Tensor:
    value = model(*args)
    value.square().sum().backward()
    return value.detach()


def equals_cpu(host: nn.Module, *args: Tensor) -> list[tuple[int, int]]:
    """Trains once, compares results and gradients with the CPU; returns what its graphs became."""
    device = copy.deepcopy(host).to("tpu")
    known = len(layered())
    got = train(torch.compile(device, fullgraph=True), *(a.to("tpu") for a in args))
    torch.testing.assert_close(got.cpu(), train(host, *args), rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(host.named_parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    return layered()[known:]


IDS = torch.randint(0, 10, (2, 4), generator=torch.Generator().manual_seed(0))


def test_programs_before_and_after() -> None:
    """One each of forward and backward; where a layer is launched by itself, three, however many layers there are."""
    torch.manual_seed(0)
    pieces = ["before the layers", "one layer", "after the layers"]
    for count in (7, 8, 13):
        torch.compiler.reset()
        model, many = Model(count), count > 7
        assert len(plans_of(lambda m=model: equals_cpu(m, IDS))) == (6 if many else 2)
        for graph, direction in zip(metrics.snapshot()["graphs"][-2:], ("forward", "backward"), strict=True):
            assert graph["name"].endswith(f", {direction}")
            assert (graph["layers"], graph["parts"]) == ((count, 3) if many else (0, 1))
            names = [p["name"].removeprefix(graph["name"]) for p in graph["programs"]]
            assert names == ([f", {piece}" for piece in pieces] if many else [""])
    assert "13 equal layers share one of its 3 programs" in metrics.report(most=10**6)


def test_small_layers_stay_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered_program, "LEAST_SECONDS", 1)
    assert equals_cpu(Model(8), IDS) == [(0, 1)] * 2


def test_random_numbers_are_those_of_eager() -> None:
    model, ids = Model(8, dropout=0.5).to("tpu"), IDS.to("tpu")
    results = []
    known = len(layered())
    for function in (model, torch.compile(model)):
        torch.manual_seed(7)
        model.zero_grad()
        value = train(function, ids)
        results.append([value, torch.rand(2, device="tpu"), *(p.grad.clone() for p in model.parameters())])
    assert layered()[known:] == [(8, 3)] * 2
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """One layer, applied again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 8), Layer()

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), torch.ones(4, 4, device=ids.device).tril().bool()
        for _ in range(9):
            x = self.layer(x, mask)
        return x @ self.embed.weight.T


def test_tied_layers() -> None:
    """Gradients are added between two layers, each time by the same program."""
    torch.manual_seed(0)
    assert equals_cpu(Tied(), IDS) == [(9, 3), (9, 4)]


def test_an_unequal_layer_among_equal_ones() -> None:
    """Those in front of it are part of the program before the layers."""
    torch.manual_seed(0)
    model = Model(10)
    model.layers[1].out = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))
    assert equals_cpu(model, IDS) == [(8, 3)] * 2


class Recomputing(Model):
    """Its last part is computed again in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return checkpoint(lambda x: F.gelu(x * 2) * x.sigmoid(), x, use_reentrant=False)


def test_checkpointing_around_the_layers() -> None:
    torch.manual_seed(0)
    found = equals_cpu(Recomputing(8), IDS)
    assert [count for count, _ in found] == [8, 8]


def test_memory_is_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for backward, and at most held during a step: with the layers together, and one by one."""
    ids, found = torch.zeros(64, 32, dtype=torch.long, device="tpu"), []
    for least in (99, 8):
        monkeypatch.setattr(layered_program, "LEAST_LAYERS", least)
        torch.compiler.reset()
        model = Model(8).to("tpu")
        step = torch.compile(model)
        train(step, ids)
        model.zero_grad()
        before = torch.tpu.memory_allocated()
        torch.tpu.reset_peak_memory_stats()
        loss = step(ids).square().sum()
        kept = torch.tpu.memory_allocated() - before
        loss.backward()
        torch.tpu.synchronize()
        found.append((kept, torch.tpu.max_memory_allocated() - before))
        del loss, model, step
    together, apart = found
    assert apart[0] <= together[0]
    assert apart[1] <= together[1]


def test_written_arguments_and_results_that_alias() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList(Layer() for _ in range(8)), torch.randn(2, 4, 8)
    mask = torch.ones(4, 4).tril().bool()

    def function(x: Tensor, mask: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x
        for layer in modules:
            x = layer(x, mask)
        state.add_(x.sum())
        return x, x.flatten(1), first[0]

    results: list[Any] = []
    for device in ("cpu", "tpu"):
        modules = copy.deepcopy(model).to(device)
        state, given = torch.zeros(3, device=device), x.clone().to(device)
        with torch.no_grad():
            step = torch.compile(function, fullgraph=True) if device == "tpu" else function
            y, flat, first = step(given, mask.to(device), state)
            flat += 1
            first += 1
        results.append([t.cpu() for t in (y, flat, first, given, state)])
    assert layered()[-1][0] == 8
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_in_fused_mode() -> None:
    torch.manual_seed(0)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        assert equals_cpu(Model(8), IDS) == [(8, 3)] * 2


@pytest.mark.usefixtures("cache")
def test_a_later_process_makes_none_of_it_again() -> None:
    model, ids = Model(8).to("tpu"), IDS.to("tpu")
    with torch.no_grad():
        want, cold = anew(model.forward, ids)
        got, warm = anew(model.forward, ids)
    assert (cold, warm) == ({"miss": 1, "saved": 1}, {"hit": 1, "plans": 3})
    assert layered()[-1] == (8, 3)
    torch.testing.assert_close(got, want)


def test_how_long_a_graph_takes_at_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 100×200 and 200×300 is 12 million operations; it reads and writes 440,000 bytes."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(torch.ops.aten.mm.default, (x, y))
    graph.output((product,))
    for node, shape in ((x, (100, 200)), (y, (200, 300)), (product, (100, 300))):
        node.meta["val"] = torch.empty(shape)
    module = torch.fx.GraphModule(nn.Module(), graph)
    for peak, seconds in (((12e6, 1e9), 1.0), ((12e9, 44e4), 1.0), ((24e6, 44e4), 1.0), ((6e6, 44e4), 2.0)):
        monkeypatch.setattr(roofline, "_peak", lambda peak=peak: peak)
        assert roofline.least_seconds(module) == pytest.approx(seconds)
