"""torch.compile on the device: one program for forward and one for backward, equal to eager and to the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_tpu import metrics


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def programs() -> float:
    return metrics.counters().get("program", 0)


def executions() -> float:
    return metrics.counters().get("execute", 0)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **options)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


@pytest.mark.parametrize("options", [{}, {"backend": "tpu"}, {"backend": "inductor"}, {"mode": "max-autotune"}])
def test_training_equals_cpu(options: dict[str, str]) -> None:
    host = network()
    device = copy.deepcopy(host).to("tpu")
    step = compiled(device, **options)
    x = torch.randn(4, 8)
    for _ in range(2):
        want, got = host(x), step(x.to("tpu"))
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(host.named_parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, p), q in zip(host.named_buffers(), device.named_buffers(), strict=True):
        torch.testing.assert_close(q[1].cpu(), p, msg=name)


def test_forward_and_backward_are_one_program_each() -> None:
    model, x = network().to("tpu"), torch.randn(4, 8).to("tpu")
    step = compiled(model)
    step(x).sum().backward()
    before = programs(), executions()
    loss = step(x).sum()
    assert executions() - before[1] == 2  # the graph, and the sum outside it
    loss.backward()
    assert programs() == before[0]
    # ones_like, expand's clone if any, the graph, and one addition of gradients for each parameter
    assert executions() - before[1] <= 2 + 3 + len(list(model.parameters()))


def test_other_graphs_go_to_their_own_backend() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(seen) == 1
    from torch._inductor import compile_fx

    from torch_tpu.compile.frontend.on_device import is_on_device

    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    assert not is_on_device(graph, [torch.ones(2)])
    assert is_on_device(graph, [torch.ones(2, device="tpu")])
    assert compile_fx.compile_fx.__module__ == "torch_tpu.device.compile_patches"


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(Exception, match="unknown mode 'fastest'"):
        torch.compile(lambda x: x + 1, backend="tpu", mode="fastest")(torch.ones(2, device="tpu"))


def test_options() -> None:
    x = torch.ones(2, device="tpu")
    options = {"epilogue_fusion": True, "max-autotune": True}
    for backend in ("tpu", "inductor"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.compile(lambda x: x + 1, backend=backend, options=options)(x).tolist() == [2.0, 2.0]
        assert any("ignores options of Inductor: epilogue_fusion, max-autotune" in str(w.message) for w in caught) == (
            backend == "tpu"
        )
        torch.compiler.reset()
    with pytest.raises(Exception, match="unknown option 'fastest'"):
        torch.compile(lambda x: x + 1, backend="tpu", options={"fastest": True})(x)
    with pytest.raises(RuntimeError, match="Unexpected optimization option fastest"):
        torch.compile(lambda x: x + 1, options={"fastest": True})


def test_a_cache_is_written_in_place() -> None:
    @compiled
    def write(cache: torch.Tensor, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, row)
        return cache.sum(0)

    cache, storage = torch.zeros(4, 2, device="tpu"), None
    for i in range(3):
        total = write(cache, torch.tensor([i], device="tpu"), torch.full((1, 2), i + 1.0, device="tpu"))
        storage = storage or cache.untyped_storage().data_ptr()
        assert cache.untyped_storage().data_ptr() == storage
    assert cache.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    assert total.tolist() == [6.0, 6.0]


def test_results_that_are_views_of_inputs_stay_views() -> None:
    x = torch.arange(6.0, device="tpu")
    y = compiled(lambda x: x.view(2, 3)[1])(x)
    y += 10
    assert x.tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]


def test_conjugated_results() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j], device="tpu")
    function = compiled(lambda z: ((z * 2).conj(), z.conj(), (z * 1j).conj().imag, torch.fft.ifft(z)))
    for got, want in zip(function(z), (2 * z.conj(), z.conj(), -z.real, torch.fft.ifft(z.cpu())), strict=True):
        torch.testing.assert_close(got.cpu(), want.cpu())


def test_constants_and_tensors_made_inside() -> None:
    table = torch.tensor([10.0, 20.0, 30.0], device="tpu")
    function = compiled(lambda x: x + table + torch.arange(3, device=x.device) + torch.tensor(0.5, device="tpu"))
    assert function(torch.zeros(3, device="tpu")).tolist() == [10.5, 21.5, 32.5]
    table += 1
    assert function(torch.zeros(3, device="tpu")).tolist() == [11.5, 22.5, 33.5]


def test_random_numbers_are_those_of_eager() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.randn(x.shape, device=x.device)

    x = torch.ones(20, device="tpu")
    torch.manual_seed(5)
    want = [draw(x).tolist(), draw(x).tolist()]
    torch.manual_seed(5)
    function = compiled(draw)
    torch.testing.assert_close([function(x).tolist(), function(x).tolist()], want)
    assert want[0] != want[1]


def test_dynamic_shapes_share_a_graph_and_specialise_programs() -> None:
    graphs = []

    def counted(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("tpu")(graph, examples)

    function = torch.compile(lambda x: (x * x.shape[0]).sum(0) @ x.new_ones(2), backend=counted, dynamic=True)
    for size in (3, 4, 5, 4):
        assert function(torch.ones(size, 2, device="tpu")).item() == 2.0 * size * size
    assert len(graphs) == 1


def test_autocast_and_checkpoint() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to("tpu")
    x = torch.randn(2, 4).to("tpu").requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu", torch.bfloat16):
            return checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=False).float().sum()

    results = []
    for function in (run, compiled(run)):
        x.grad = layer.weight.grad = None
        value = function(x)
        value.backward()
        results.append((value.item(), x.grad.tolist(), layer.weight.grad.tolist()))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_a_graph_is_cut_around_what_no_program_can_express() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = compiled(lambda x: torch.nonzero(x).sum() + x.sum())
        before = metrics.counters().get("graph_cut", 0)
        assert function(torch.tensor([0.0, 3.0, 4.0], device="tpu")).item() == 10.0
    assert metrics.counters().get("graph_cut", 0) == before + 1


def test_a_compiled_optimizer() -> None:
    results = []
    x = torch.randn(4, 8, device="tpu")
    for compile_it in (False, True):
        torch.manual_seed(1)
        # No batch normalisation: the gradient of a bias before it is nothing but rounding, which Adam makes large.
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device="tpu"), capturable=True)
        step = torch.compile(optimizer.step) if compile_it else optimizer.step
        for _ in range(3):
            model(x).square().sum().backward()
            step()
            optimizer.zero_grad()
        results.append([p.cpu() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_wrong_indices_raise() -> None:
    function = compiled(lambda table, i: F.embedding(i, table))
    with pytest.raises(IndexError, match="index out of range in self"):
        function(torch.ones(3, 2, device="tpu"), torch.tensor([5], device="tpu"))
