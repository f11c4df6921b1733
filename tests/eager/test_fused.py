"""Fused eager: what is recorded gives what the CPU gives, runs when it must, and equal layers share programs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torch_tpu import metrics
from torch_tpu.eager.deferred import deferred_graph, segment, thread_graphs
from torch_tpu.eager.program.plan import Plan
from torch_tpu.runtime.client import Executable

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    with torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE):
        yield


def counted(name: str) -> float:
    return metrics.counters().get(name, 0)


def test_nothing_runs_before_a_value_is_needed():
    x = torch.arange(6.0, device="tpu").reshape(2, 3)
    torch.tpu.synchronize()
    before = counted("execute")
    y = ((x + 1) * 2) @ x.T
    y[0] -= 1
    assert counted("execute") == before
    assert y.tolist() == [[15.0, 51.0], [34.0, 124.0]]
    assert counted("execute") == before + 1


def test_dead_results_are_not_computed():
    x = torch.ones(4, 4, device="tpu")
    torch.tpu.synchronize()
    before = counted("fused_program"), counted("execute")
    unused = torch.sort(x + 3)
    del unused
    torch.tpu.synchronize()
    assert (counted("fused_program"), counted("execute")) == before


def test_only_what_is_referred_to_becomes_a_buffer():
    x = torch.ones(1000, device="tpu")
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    y = (x * 2 + 1).exp().sum()
    assert y.item() == pytest.approx(1000 * torch.tensor(3.0).exp().item(), rel=1e-5)
    assert torch.tpu.memory_allocated() - before == 4


def test_a_write_does_not_change_what_was_read_before():
    x = torch.zeros(3, device="tpu")
    copy, view = x.clone(), x[1:]
    y = x + 1
    x.fill_(5)
    view *= 2
    assert (copy.tolist(), y.tolist(), x.tolist()) == ([0.0] * 3, [1.0] * 3, [5.0, 10.0, 10.0])


def test_numbers_are_data():
    x = torch.ones(3, device="tpu")
    results = []
    compiled = []
    for step in range(5):
        y = x * (0.1 * step) + step
        y[step % 3] = step
        results.append(y.tolist())
        compiled.append(counted("fused_program"))
    want = []
    for step in range(5):
        y = torch.ones(3) * (0.1 * step) + step
        y[step % 3] = step
        want.append(y.tolist())
    assert results == want
    assert compiled[-1] == compiled[3]  # y[0] is where y starts, y[1] and y[2] are not


def test_random_numbers_are_those_of_strict_mode():
    def draw() -> list[float]:
        torch.manual_seed(3)
        a = torch.randn(5, device="tpu")
        b = nn.functional.dropout(torch.ones(20, device="tpu"), 0.5)
        return [*a.tolist(), *b.tolist(), *torch.rand(3, device="tpu").tolist()]

    fused = draw()
    with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
        assert draw() == fused


def test_leaving_the_mode_runs_what_is_pending():
    x = torch.ones(2, device="tpu") + 1
    with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
        assert (x * 2).tolist() == [4.0, 4.0]


def test_graphs_of_other_threads_are_run_when_used():
    results: list[torch.Tensor] = []
    x = torch.ones(3, device="tpu") * 2

    def work() -> None:
        with torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE):
            results.append(x + 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (results[0] * 2).tolist() == [6.0] * 3


def test_many_threads_record_at_once():
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = torch.full((4, 4), float(seed), device="tpu")
            for _ in range(300):
                x = x * 0.5 + seed
            host = torch.full((4, 4), float(seed))
            for _ in range(300):
                host = host * 0.5 + seed
            torch.testing.assert_close(x.cpu(), host)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_wrong_index_names_the_operator_and_the_line():
    table = torch.randn(4, 2, device="tpu")
    row = nn.functional.embedding(torch.tensor([1, 7], device="tpu"), table)  # the line
    line = test_a_wrong_index_names_the_operator_and_the_line.__code__.co_firstlineno + 2
    with pytest.raises(IndexError, match=rf"embedding, called at .*test_fused\.py:{line}\)"):
        row.sum().item()
    assert (table * 0).sum().item() == 0  # not sticky, and the other tensors are as before


def test_a_refused_write_does_not_happen():
    x = torch.zeros(3, 2, device="tpu")
    x.index_add_(0, torch.tensor([0, 9], device="tpu"), torch.ones(2, 2, device="tpu"))
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        x.sum().item()
    assert x.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.floor_divide_(0),
        lambda t: t.remainder_(torch.zeros_like(t)),
        lambda t: t[1:].fmod_(0),
        lambda t: t.index_add_(0, torch.tensor([1, 9], device=t.device), t[:2].clone()),
        lambda t: t[:2].scatter_(0, torch.tensor([5], device=t.device), 1),
        lambda t: t.index_fill_(0, torch.tensor([7], device=t.device), 0),
    ],
)
def test_a_refused_write_is_none_to_autograd(write):
    """The CPU raises before it counts the write; here the mistake shows when the write has been counted."""
    x = torch.arange(8.0, device="tpu", requires_grad=True)
    index = torch.tensor([1, 3, 3], device="tpu")
    y = x[index] * 2
    before = index._version
    write(index)
    with pytest.raises((RuntimeError, IndexError)):
        torch.tpu.synchronize()
    assert (index.tolist(), index._version) == ([1, 3, 3], before)
    index.add_(0)
    assert index._version == before + 1
    index = torch.tensor([1, 3, 3], device="tpu")
    y = y + x[index]
    write(index)
    with pytest.raises((RuntimeError, IndexError)):
        torch.tpu.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # the first index was written after all
    x[index].sum().backward()
    assert x.grad.tolist() == [0, 1, 0, 2, 0, 0, 0, 0]


def test_what_fails_to_compile_names_its_line_and_spares_the_rest(monkeypatch):
    x = torch.ones(3, device="tpu")
    good = x + 1
    bad = x.sin()
    worse = bad + 1
    line = test_what_fails_to_compile_names_its_line_and_spares_the_rest.__code__.co_firstlineno + 3
    compiled = Plan.compiled

    def refuse(*args: object) -> None:
        raise RuntimeError("too large")

    def all_but_sin(plan: Plan) -> Executable:
        return refuse() if plan.name == "sin" else compiled(plan)

    monkeypatch.setattr(segment, "find", refuse)
    monkeypatch.setattr(Plan, "compiled", all_but_sin)
    with pytest.raises(RuntimeError, match="too large") as caught:
        good.tolist()
    assert f"in sin, called at {__file__}:{line}" in str(caught.value)
    assert good.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="never computed"):
        worse.tolist()
    monkeypatch.undo()
    assert (good * 2).tolist() == [4.0] * 3


def test_a_fault_in_making_programs_is_told(monkeypatch):
    """Operators that run one by one give the right values, slowly: nobody would notice."""
    x = torch.ones(3, device="tpu")
    torch.tpu.synchronize()
    y = x + 1

    def typo(*args: object) -> None:
        raise AttributeError("no_such_name")

    monkeypatch.setattr(segment, "find", typo)
    with pytest.raises(RuntimeError, match=r"internal error of torch_tpu.*no_such_name"):
        y.tolist()
    monkeypatch.undo()
    assert y.tolist() == [2.0] * 3


def test_what_was_never_computed_can_not_be_recorded(monkeypatch):
    x = torch.ones(3, device="tpu")
    torch.tpu.synchronize()
    other, bad = x + 2, x.sin()

    def refuse(*args: object) -> None:
        raise RuntimeError("too large")

    monkeypatch.setattr(segment, "find", refuse)
    monkeypatch.setattr(Plan, "compiled", refuse)
    with pytest.raises(RuntimeError, match="too large"):
        bad.tolist()
    monkeypatch.undo()
    for use in (lambda: bad * 2.0, lambda: torch.stack([x, bad]), lambda: x.add_(bad), lambda: other + x):
        with pytest.raises(RuntimeError, match="never computed"):
            use()
    assert (x + 1).tolist() == [2.0] * 3


def test_conditions_are_looked_at_after_a_failure(monkeypatch):
    """Neither one that was never computed nor one that another thread has still to run hides a later one."""
    table, index = torch.ones(3, 2, device="tpu"), torch.tensor([7], device="tpu")
    torch.tpu.synchronize()
    lost = nn.functional.embedding(index, table.sin())

    def refuse(*args: object) -> None:
        raise RuntimeError("too large")

    monkeypatch.setattr(segment, "find", refuse)
    monkeypatch.setattr(Plan, "compiled", refuse)
    with pytest.raises(RuntimeError, match="too large"):
        lost.tolist()
    monkeypatch.undo()

    waiting: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: waiting.append(nn.functional.embedding(index, table)))
    thread.start()
    thread.join()
    with pytest.raises(IndexError, match="index out of range"):
        nn.functional.embedding(index, table).tolist()
    with pytest.raises(IndexError, match="index out of range"):
        waiting[0].tolist()


def test_an_interruption_leaves_the_graph(monkeypatch):
    y = torch.ones(3, device="tpu") + 1

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(segment, "find", interrupted)
    with pytest.raises(KeyboardInterrupt):
        y.tolist()
    monkeypatch.undo()
    assert y.tolist() == [2.0] * 3


# --- where graphs are cut ----------------------------------------------------------------------------------------


def test_a_long_graph_runs_while_it_grows():
    x = torch.zeros(2, device="tpu")
    torch.tpu.synchronize()
    before = counted("execute")
    for _ in range(10 * deferred_graph.SHORTEST_SEGMENT):
        x = x + 1
    assert 4 <= counted("execute") - before <= 10
    assert x.tolist() == [10.0 * deferred_graph.SHORTEST_SEGMENT] * 2


def test_backward_is_recorded_behind_forward():
    """No program lies between them, so what forward saves never becomes a buffer; the gradients are the CPU's."""
    weights = [torch.linspace(-1, 1, 12).reshape(4, 3), torch.linspace(1, -1, 6).reshape(3, 2)]

    def gradients(device: str) -> list[torch.Tensor]:
        first, second = (w.to(device).requires_grad_() for w in weights)
        x = torch.linspace(0, 1, 8).reshape(2, 4).to(device)
        if device == "tpu":
            torch.tpu.synchronize()
        before = counted("execute")
        (torch.tanh(x @ first) @ second).square().sum().backward()
        assert counted("execute") == before
        return [first.grad, second.grad]

    for own, cpu in zip(gradients("tpu"), gradients("cpu"), strict=True):
        before = counted("execute")
        torch.testing.assert_close(own.cpu(), cpu)
        assert counted("execute") <= before + 1


@pytest.mark.parametrize("threads", [True, False])
def test_backward_leaves_the_setting_of_its_threads(threads):
    with torch.autograd.set_multithreading_enabled(threads):
        x = torch.ones(2, device="tpu", requires_grad=True)
        x.sum().backward()
        assert torch.autograd.is_multithreading_enabled() is threads
        assert x.grad.tolist() == [1.0, 1.0]


def test_a_graph_of_a_tpu_is_cut_where_few_bytes_cross(monkeypatch):
    pending = thread_graphs.current()
    monkeypatch.setattr(pending, "_runs_on_cpu", False)
    original = deferred_graph.DeferredGraph._cut
    cut = []

    def noted(self: deferred_graph.DeferredGraph, shortest: int) -> int:
        n = original(self, shortest)
        cut.append(self.operators[n - 1][0].name)
        return n

    monkeypatch.setattr(deferred_graph.DeferredGraph, "_cut", noted)

    def layers(x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = (x + column).sin().cos().mean(0)  # 64 numbers, 2**18, 2**18, 2**18, 64
        return x

    x, column = torch.linspace(0, 1, 64), torch.linspace(0, 1, 4096).reshape(-1, 1)
    result = layers(x.to("tpu"), column.to("tpu")).cpu()
    assert cut
    assert set(cut) == {"mean"}
    torch.testing.assert_close(result, layers(x, column))


def mlp(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()))).to("tpu")


def programs_of_a_step(layers: int) -> float:
    model, x = mlp(layers), torch.ones(2, 8, device="tpu")
    segment.clear()
    before = counted("fused_program")
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all().item() for p in model.parameters())
    return counted("fused_program") - before


def test_equal_layers_share_programs():
    """Twice as many layers are cut into twice as many chunks, but need hardly more programs."""
    assert programs_of_a_step(240) <= programs_of_a_step(120) + 1


@pytest.mark.parametrize("fused", [True, False])
def test_equal_parameters_share_the_optimizer_program(fused):
    model = mlp(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.tpu.synchronize()
    segment.clear()
    before = counted("fused_program")
    optimizer.step()
    torch.tpu.synchronize()
    assert counted("fused_program") - before <= 6  # two shapes; with foreach, chunks of different lengths
    host = mlp(12).cpu()
    on_host = torch.optim.AdamW(host.parameters(), lr=0.1)
    for p in host.parameters():
        p.grad = torch.ones_like(p)
    on_host.step()
    on_host.step()
    for got, want in zip(model.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), want)


# --- memory ------------------------------------------------------------------------------------------------------


def test_pending_graphs_leave_nothing_to_the_garbage_collector():
    def use() -> None:
        x = torch.ones(10, device="tpu")
        for _ in range(200):
            x = x + 1
        x.tolist()

    use()  # tracing and compiling make cycles, once
    use()
    gc.collect()
    gc.disable()
    try:
        y = torch.ones(10, device="tpu") + 1
        value = weakref.ref(y.untyped_storage().value)
        del y
        assert value() is None
        torch.tpu.synchronize()
        gc.collect()
        # Bounded tables let go of old programs now and then, cycles among them; that is none of pending graphs.
        assert 0 in [(use(), gc.collect())[1] for _ in range(3)]
    finally:
        gc.enable()


def test_a_refused_out_is_the_only_error() -> None:
    """The operator was recorded before `out` was found not to fit; its own condition is not looked at any more."""
    weights = torch.zeros(1, 2, device="tpu")
    with pytest.raises(RuntimeError, match="expects Long tensor out"):
        torch.multinomial(weights, 2, out=torch.zeros(1, 2, device="tpu"))
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="sum of probabilities"):
        torch.multinomial(weights, 2).tolist()
