"""Equal layers that write to what they are given (statistics, key-value caches) are handled once and write in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.compile.test_autograd_cache import anew, cache  # noqa: F401
from tests.compile.test_layers import _any_size, equals_cpu, layered  # noqa: F401
from tests.compile.test_outline import captured, outlined
from torch_tpu import compile as tpu_compile
from torch_tpu import metrics
from torch_tpu.compile.layers import layered_program, outline, repetition

COPY = torch.ops.aten.copy_.default


class Normalised(nn.Module):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(in_place)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.relu(self.conv(torch.sin(x)))))
        h += x
        return self.relu(h)


class Caching(nn.Module):
    """Attention over what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, 2, 256, 4))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mask = torch.arange(256, device=x.device) <= at[:, None]
        return x + F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(count))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x * 2


def equal_buffers(host: nn.Module, device: nn.Module) -> None:
    for (name, p), q in zip(host.named_buffers(), device.buffers(), strict=True):
        torch.testing.assert_close(q.cpu(), p, msg=lambda m, name=name: f"{name}: {m}")


def targets(graph: fx.GraphModule) -> list[Any]:
    return [n.target for n in graph.graph.nodes if n.op in ("call_function", "call_method")]


def test_a_graph_before_and_after() -> None:
    """A part returns the new value of what it writes to, which is written behind it."""
    model = Decoder(4).to("tpu").requires_grad_(False)
    before = captured(model, torch.ones(2, 1, 8, device="tpu"), torch.tensor([3], device="tpu"))
    assert targets(before).count("index_copy_") == 8
    found, region = outline.outline(before)
    assert region is not None
    assert (region.outputs, len(region.written)) == (1, 2)
    part = [torch.ops.torch_tpu.region.default, *["getitem"] * 3, "copy_", "copy_"]
    names = ["getitem" if getattr(t, "__name__", "") == "getitem" else t for t in targets(found)]
    assert sorted(map(str, names)) == sorted(map(str, [*part * 4, *names[-1:]]))
    assert torch.ops.aten.index_copy.default in targets(region.forward)
    assert not any(getattr(t, "_schema", None) and t._schema.is_mutable for t in targets(region.forward))


def test_a_layer_before_and_after() -> None:
    """What is launched for each layer writes to its argument, and returns what others use."""
    graph = fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    new = graph.call_function(torch.ops.aten.add.Tensor, (state, x))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (new, x)), new))
    module = layered_program._writing(fx.GraphModule(nn.Module(), graph), [(1, 1)], [0])
    assert targets(module) == [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, COPY]
    given = torch.tensor(5.0)
    assert [t.item() for t in module(torch.tensor(2.0), given)] == [14.0]
    assert given.item() == 7.0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("depth", [5, 8])
def test_statistics_of_training(depth: int, in_place: bool) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(4, 4, 1), *(Normalised(in_place) for _ in range(depth))).double()
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    device, before = copy.deepcopy(host).to("tpu"), outlined()
    step = torch.compile(device, fullgraph=True)
    for _ in range(2):
        want, got = host(x), step(x.to("tpu"))
        for value in (want, got):
            value.square().mean().backward()
        torch.testing.assert_close(got.cpu(), want)
    equal_buffers(host, device)
    assert host[1].norm.num_batches_tracked.item() == 2
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad)
    assert outlined() - before == depth
    assert [count for count, _ in layered()[-2:]] == [8 if depth == 8 else 0] * 2


def test_sharing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    host, results = Decoder(8), []
    x = torch.randn(2, 1, 8, device="tpu")
    for least in (99, 4):
        monkeypatch.setattr(repetition, "LEAST_COPIES", least)
        torch.compiler.reset()
        model = copy.deepcopy(host).to("tpu")
        step = torch.compile(model)
        with torch.no_grad():
            values = [step(x, torch.tensor([at], device="tpu")).tolist() for at in (0, 1, 2)]
        results.append([*values, *(b.tolist() for b in model.buffers())])
    assert [depth for depth, _ in layered()[-2:]] == [0, 8]
    assert results[1] == results[0]


@pytest.mark.parametrize(("depth", "count"), [(5, 1), (8, 2)])
def test_caches_are_written_where_they_lie(depth: int, count: int) -> None:
    """With a program for everything and with one for the layers: values, and no copy of a cache."""
    torch.manual_seed(0)
    host, x = Decoder(depth), torch.randn(2, 1, 8)
    device, before = copy.deepcopy(host).to("tpu"), outlined()
    with torch.no_grad():
        shown = tpu_compile.debug(device, x.to("tpu"), torch.tensor([3], device="tpu"))
        torch.testing.assert_close(shown.result.cpu(), host(x, torch.tensor([3])))
    equal_buffers(host, device)
    assert outlined() - before == depth
    assert len(shown.programs) == count
    nbytes = sum(b.nbytes for b in device.buffers()) // (depth if count > 1 else 1)
    assert shown.memory["alias"] == nbytes
    assert shown.memory["temporary"] < device.layers[0].keys.nbytes


def test_nothing_is_held_beside_the_caches() -> None:
    model, x = Decoder(8).to("tpu"), torch.ones(2, 1, 8, device="tpu")
    step = torch.compile(model)
    with torch.no_grad():
        step(x, torch.tensor([0], device="tpu"))
        torch.tpu.synchronize()
        before = torch.tpu.memory_allocated()
        torch.tpu.reset_peak_memory_stats()
        step(x, torch.tensor([1], device="tpu"))
        torch.tpu.synchronize()
    assert layered()[-1] == (8, 2)
    assert torch.tpu.max_memory_allocated() - before < model.layers[0].keys.nbytes


def test_an_index_out_of_bounds_leaves_the_cache_as_it_was() -> None:
    model, x = Decoder(8).to("tpu"), torch.ones(2, 1, 8, device="tpu")
    step = torch.compile(model)
    with torch.no_grad():
        step(x, torch.tensor([0], device="tpu"))
        want = [b.cpu() for b in model.buffers()]
        with pytest.raises(IndexError):
            step(x, torch.tensor([256], device="tpu"))
    torch.testing.assert_close([b.cpu() for b in model.buffers()], want)


def test_what_others_read_is_written_at_the_end() -> None:
    """The old value of a cache, and the new one of another: results are what they are without sharing."""
    torch.manual_seed(0)
    host, x = Decoder(8), torch.randn(2, 1, 8)
    results: list[Any] = []
    for device in ("cpu", "tpu"):
        model = copy.deepcopy(host).to(device)

        def step(x: Tensor, at: Tensor, model: nn.Module = model) -> tuple[Tensor, ...]:
            old = model.layers[2].keys * 3
            y = model(x, at)
            return y, old, model.layers[4].values.sum(0), model.layers[5].keys

        function = torch.compile(step, fullgraph=True) if device == "tpu" else step
        with torch.no_grad():
            returned = function(x.to(device), torch.tensor([3], device=device))
        returned[3][0, 0, 0] = 9.0  # a cache itself
        results.append([t.cpu() for t in (*returned, *model.buffers())])
    torch.testing.assert_close(results[1], results[0])
    assert layered()[-1][0] == 8


def test_writes_that_stay_where_they_are() -> None:
    """To what needs a gradient, and to what shares its memory with another argument."""

    def gradient(x: Tensor) -> Tensor:
        for _ in range(5):
            y = x.exp()
            x.mul_(0.5)
            x = x.tanh() * (y.tanh().sigmoid() + 1)
        return x

    def shared(x: Tensor, y: Tensor) -> Tensor:
        whole, half = y, y[:2]
        for _ in range(5):
            whole.add_(1)
            x = (x.sin().exp().cos() + half).tanh().sigmoid()
        return x

    alone = metrics.counters().get("repetition_left_alone", 0)
    for function, shapes in ((gradient, [(2,)]), (shared, [(2,), (4,)])):
        leaves = [[torch.ones(s, device=d, requires_grad=True) for s in shapes] for d in ("cpu", "tpu")]
        given = [[t * 1 if i == 0 else t.detach() for i, t in enumerate(side)] for side in leaves]
        torch.compiler.reset()
        want, got = function(*given[0]), torch.compile(function)(*given[1])
        torch.testing.assert_close(got.cpu(), want)
        torch.testing.assert_close([t.cpu() for t in given[1]], given[0])
        torch.autograd.backward([want.sum()])
        torch.autograd.backward([got.sum()])
        torch.testing.assert_close(leaves[1][0].grad.cpu(), leaves[0][0].grad)
    assert metrics.counters()["repetition_left_alone"] == alone + 2


@pytest.mark.usefixtures("cache")
def test_a_later_process_makes_none_of_it_again() -> None:
    model, x, at = Decoder(8).to("tpu"), torch.ones(2, 1, 8, device="tpu"), torch.tensor([2], device="tpu")
    with torch.no_grad():
        want, cold = anew(model.forward, x, at)
        for b in model.buffers():
            b.zero_()
        got, warm = anew(model.forward, x, at)
    assert (cold, warm) == ({"miss": 1, "saved": 1}, {"hit": 1, "plans": 2})
    torch.testing.assert_close(got, want)
    assert all(b[:, :, 2].any() for b in model.buffers())
