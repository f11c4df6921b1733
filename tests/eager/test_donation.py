"""Programs take the memory of what they write and of inputs that die, and never that of what somebody refers to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from torch_tpu import metrics
from torch_tpu.eager.deferred import deferred_graph, segment, thread_graphs
from torch_tpu.eager.dispatch import launch
from torch_tpu.eager.program import argument_buffers, plan_table
from torch_tpu.eager.program.plan import Plan
from torch_tpu.runtime import client as runtime
from torch_tpu.runtime import process_client
from torch_tpu.tensor.storage import Value

EagerMode = torch.tpu.EagerMode
# Small enough for a test, too large to share an allocation with anything else.
SIZE = 1000


FUSED, STRICT = EagerMode.DEFER_AND_FUSE, EagerMode.DEFER_NEVER
in_both_modes = pytest.mark.parametrize("failures", [FUSED, STRICT], indirect=True, ids=["fused", "strict"])


@pytest.fixture(autouse=True)
def failures(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Fused mode, or another. A test names here each chunk that it lets fail: else the recovery would hide mistakes."""
    expected: list[str] = []
    before = metrics.counters().get("fused_failure", 0)
    with torch.tpu.set_eager_mode(getattr(request, "param", FUSED)):
        yield expected
    assert metrics.counters().get("fused_failure", 0) - before == len(expected)


def ones() -> torch.Tensor:
    x = torch.ones(SIZE, device="tpu")
    torch.tpu.synchronize()
    return x


def value(x: torch.Tensor) -> Value:
    return x.untyped_storage().value


def address(x: torch.Tensor) -> int:
    return value(x).array.unsafe_buffer_pointer()


def run() -> None:
    thread_graphs.current().flush("test")


def aliased_bytes() -> int:
    """Of all programs made since `chunk.clear`."""
    return sum(p.executable.loaded.get_compiled_memory_stats().alias_size_in_bytes for p in segment._compiled.values())


def test_a_write_happens_in_place():
    x = ones()
    place = address(x)
    segment.clear()
    x.mul_(3).sub_(1)
    run()
    assert aliased_bytes() == 4 * SIZE
    assert address(x) == place
    assert x.tolist() == [2.0] * SIZE


@in_both_modes
def test_a_buffer_that_somebody_refers_to_is_not_written():
    x = ones()
    buffer = value(x).array
    x.add_(1)
    run()
    assert not buffer.is_deleted()
    assert buffer is not value(x).array


def test_a_value_that_dies_gives_its_memory_to_what_follows():
    x = ones()
    place = address(x)
    x = (x @ x).exp() + x * 2  # the last thing that reads the old x leads to the new one
    x = x.cumsum(0) * 0.5
    run()
    assert address(x) == place


@in_both_modes
@pytest.mark.parametrize(
    ("keep", "want"),
    [
        pytest.param(lambda x: x.clone(), [1.0] * SIZE, id="clone"),
        pytest.param(lambda x: x.clone()[1:3], [1.0] * 2, id="view of a clone"),
        pytest.param(lambda x: x[::2], [4.0] * (SIZE // 2), id="view"),
        pytest.param(lambda x: x.detach(), [4.0] * SIZE, id="detach"),
        pytest.param(lambda x: x.clone().untyped_storage(), None, id="storage"),
    ],
)
def test_what_somebody_refers_to_stays(keep: Callable[[torch.Tensor], torch.Tensor], want: list[float] | None):
    x = ones()
    kept = keep(x)
    for _ in range(3):
        x.add_(1)
        run()
    assert x.tolist() == [4.0] * SIZE
    if want is None:
        assert torch.empty(0, device="tpu").set_(kept).tolist() == [1.0] * SIZE
    else:
        assert kept.tolist() == want


@in_both_modes
def test_what_the_host_reads_in_place_stays():
    x = ones()
    on_host = x.cpu()
    array = process_client.client().get(value(x).array)  # on XLA:CPU the buffer's own memory
    x.add_(1)
    run()
    assert (array == 1).all()
    assert on_host.tolist() == [1.0] * SIZE
    assert x.tolist() == [2.0] * SIZE


@in_both_modes
def test_what_backward_needs_stays():
    x, w = ones(), ones().requires_grad_()
    y = (x * w).exp()
    loss = (y * y).sum()
    run()
    del y
    x.zero_()  # not saved by anything whose version would matter: `x * w` saved another tensor's value
    other = w.detach().clone()
    other.add_(1)
    run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    z = (w * 2).exp()
    z.sum().backward()
    torch.testing.assert_close(w.grad.cpu(), torch.full((SIZE,), 2.0).exp() * 2)


@in_both_modes
def test_numbers_kept_for_later_stay():
    before = dict(argument_buffers.scalar_buffers)
    x = ones()
    for _ in range(3):
        x.mul_(2.0).add_(0.5)
        run()
    with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
        x.mul_(2.0).add_(0.5)
    assert x[0].item() == ((1 * 2 + 0.5) * 2 + 0.5) * 4 + 1.5
    assert not any(b.is_deleted() for b in [*before.values(), *argument_buffers.scalar_buffers.values()])


def test_what_another_thread_has_recorded_stays():
    x = ones()
    ready, go = threading.Event(), threading.Event()
    results: list[list[float]] = []

    def work() -> None:
        y = x + 1  # recorded in this thread's graph, which reads the value x has now
        ready.set()
        go.wait()
        results.append(y.tolist())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    x.add_(10)
    run()
    go.set()
    thread.join()
    assert results == [[2.0] * SIZE]
    assert x.tolist() == [11.0] * SIZE


@in_both_modes
def test_a_refused_write_keeps_the_old_value():
    x = torch.zeros(SIZE, 2, device="tpu")
    torch.tpu.synchronize()

    def write() -> None:
        x.index_add_(0, torch.tensor([0, SIZE], device="tpu"), torch.ones(2, 2, device="tpu"))
        torch.tpu.synchronize()

    with pytest.raises(RuntimeError, match="out of bounds"):
        write()
    assert x.sum().item() == 0


@in_both_modes
def test_an_interruption_when_programs_have_started_loses_nothing(monkeypatch):
    """In fused mode of a chunk of two parts, which have taken their inputs."""
    x, y = ones(), torch.ones(3, device="tpu")
    torch.tpu.synchronize()

    def interrupted(*args: object) -> None:
        runtime.launch(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(deferred_graph, "launch", interrupted)
    monkeypatch.setattr(launch, "enqueue", interrupted)
    for t in (x, y):
        with contextlib.suppress(KeyboardInterrupt):
            t.add_(1)
    with contextlib.suppress(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    assert (x.tolist(), y.tolist()) == ([2.0] * SIZE, [2.0] * 3)
    assert (x + 1)[0].item() == 3


@in_both_modes
def test_the_peak_does_not_count_what_is_reused():
    x = ones()
    x.add_(1)
    run()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    for _ in range(3):
        x.add_(1)
        run()
    assert torch.tpu.memory_allocated() == before
    assert torch.tpu.max_memory_allocated() - before < 4 * SIZE


@in_both_modes
def test_a_training_step_writes_in_place_and_compiles_nothing_new():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64, device="tpu")
    programs, places = [], []
    for _ in range(7):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.synchronize()
        programs.append(sum(metrics.counters().get(name, 0) for name in ("compile", "disk_cache_hit")))
        written = [*model.parameters(), model[1].running_mean, *(s["exp_avg"] for s in optimizer.state.values())]
        places.append([address(t) for t in written])
    assert programs[3:] == [programs[3]] * 4
    assert places[3:] == [places[3]] * 4


# --- torch.compile -----------------------------------------------------------------------------------------------


def compiled_plan(function: Callable[..., object]) -> Plan:
    """The plan of the graph that this call compiles."""
    known = set(plan_table.plans)
    function()
    (plan,) = [plan for key, plan in plan_table.plans.items() if key not in known and plan.name == "graph"]
    return plan


@pytest.mark.parametrize("failures", [STRICT], indirect=True)
def test_a_compiled_graph_writes_statistics_and_caches_in_place():
    norm = nn.BatchNorm1d(SIZE).to("tpu")
    cache = torch.zeros(4, SIZE, device="tpu")
    x = torch.randn(4, SIZE, device="tpu")
    where = torch.tensor([1], device="tpu")

    @torch.compile
    def step() -> torch.Tensor:
        y = norm(x)
        cache[where] = x.mean(0)
        return y

    plan = compiled_plan(step)
    places = [address(t) for t in (norm.running_mean, norm.running_var, cache)]
    step()
    assert [address(t) for t in (norm.running_mean, norm.running_var, cache)] == places
    statistics = plan.compiled().loaded.get_compiled_memory_stats()
    assert statistics.alias_size_in_bytes >= 6 * 4 * SIZE
    host = nn.BatchNorm1d(SIZE)
    host(x.cpu())
    host(x.cpu())
    torch.testing.assert_close(norm.running_var.cpu(), host.running_var)


@pytest.mark.parametrize("failures", [STRICT], indirect=True)
def test_a_compiled_graph_that_refuses_a_write_keeps_the_old_value():
    cache = torch.zeros(4, SIZE, device="tpu")
    other = cache.clone()

    @torch.compile
    def step(where: torch.Tensor) -> None:
        cache[where] = 1.0

    step(torch.tensor([1], device="tpu"))
    with pytest.raises(IndexError, match="out of bounds"):
        step(torch.tensor([4], device="tpu"))
    assert cache.sum(1).tolist() == [0.0, SIZE, 0.0, 0.0]
    assert other.sum().item() == 0


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_part_that_fails_leaves_what_ran_before_it(monkeypatch, failures):
    """The parts that ran have taken their inputs; what they gave is kept, the rest runs one by one."""
    xs = [ones() for _ in range(3)]
    z = torch.ones(3, 3, device="tpu")
    torch.tpu.synchronize()
    for x in xs:
        x.add_(1)
    z.mul_(2)
    launch = deferred_graph.launch

    def only_the_first(executables: list[object], arguments: list[object], enqueued: list[object]) -> None:
        launch(executables[:1], arguments[:1], enqueued)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(deferred_graph, "launch", only_the_first)
    failures.append("the second part")
    run()
    monkeypatch.undo()
    assert [x.tolist() for x in xs] == [[2.0] * SIZE] * 3
    assert z.tolist() == [[2.0] * 3] * 3
