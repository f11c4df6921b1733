"""Host memory stays flat however long a program runs and however many shapes it sees."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_tpu.eager.deferred import thread_graphs
from torch_tpu.eager.program import argument_buffers, call_signature, plan_table
from torch_tpu.hlo import strided
from torch_tpu.recent import Recent
from torch_tpu.tensor import storage

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_AND_FUSE, EagerMode.DEFER_NEVER], ids=["fused", "strict"])
def eager_mode(request: pytest.FixtureRequest) -> Iterator[EagerMode]:
    with torch.tpu.set_eager_mode(request.param):
        yield request.param


def growth(use: Callable[[], object], rounds: int) -> tuple[int, int]:
    """By how many objects, and blocks of memory, more calls leave the process larger."""
    counts = []
    for _ in range(2):
        for _ in range(rounds):
            use()
        torch.tpu.synchronize()
        strided.view_steps.cache_clear()  # which has a bound of its own
        gc.collect()
        counts.append((len(gc.get_objects()), sys.getallocatedblocks()))
    (objects, blocks), (more_objects, more_blocks) = counts
    return more_objects - objects, more_blocks - blocks


def test_ten_thousand_iterations_leave_nothing():
    x, y = torch.ones(4, 4, device="tpu"), torch.randn(4, 4, device="tpu")

    def iteration() -> None:
        x.mul_(0.5).add_(y)

    objects, blocks = growth(iteration, 5000)
    assert objects < 100
    assert blocks < 2000


def test_numbers_and_slices_that_change_leave_nothing(monkeypatch):
    monkeypatch.setattr(argument_buffers, "scalar_buffers", Recent(64))
    monkeypatch.setattr(argument_buffers, "start_buffers", Recent(64))
    monkeypatch.setattr(call_signature, "_views", Recent(64))
    x = torch.ones(5000, 2, device="tpu")
    step = iter(range(5000))

    def iteration() -> None:
        i = next(step)
        x[i].mul_(1 + i * 0.001)

    objects, blocks = growth(iteration, 500)
    assert objects < 500
    assert blocks < 4000


def test_shapes_that_change_are_forgotten(monkeypatch, eager_mode):
    monkeypatch.setattr(plan_table, "plans", Recent(16))
    monkeypatch.setattr(call_signature, "_views", Recent(16))
    monkeypatch.setattr(call_signature, "_view_kinds", Recent(16))
    sizes = iter(range(2, 10_000))
    shapes = 100 if eager_mode is EagerMode.DEFER_AND_FUSE else 24
    x = torch.ones(1000, device="tpu")

    def iteration() -> None:
        y = x[: next(sizes)] + 1  # in fused mode nobody asks for it: traced, not compiled
        del y

    objects, _ = growth(iteration, shapes)
    assert objects < 20 * shapes
    assert len(plan_table.plans) + len(plan_table.plans.older) <= 16


def test_geometries_live_as_long_as_something_has_them():
    gc.collect()
    before = len(storage._geometries)
    kept = [torch.empty(n, 3, device="tpu") for n in range(100, 200)]
    assert len(storage._geometries) >= before + 100
    del kept
    gc.collect()
    assert len(storage._geometries) <= before + 5


def test_recent_keeps_what_is_used():
    table = Recent(8)
    for n in range(100):
        table.keep(n, str(n))
        assert table.find(0) == "0"
    assert len(table) + len(table.older) <= 8
    assert table.find(99) == "99"
    assert table.find(50) is None


def test_pending_operators_cost_the_garbage_collector_little(eager_mode):
    """Of each recorded operator the collector tracks a handful of objects, and none is garbage for it."""
    if eager_mode is not EagerMode.DEFER_AND_FUSE:
        pytest.skip("nothing is pending")
    x = torch.ones(3, device="tpu")
    gc.disable()
    try:
        garbage = []
        for _ in range(4):
            torch.tpu.synchronize()
            gc.collect()
            before = len(gc.get_objects())
            y = x
            for _ in range(100):
                y = y + 1.0
            assert len(thread_graphs.current().operators) == 100
            assert len(gc.get_objects()) - before <= 8 * 100
            thread_graphs.current().flush("test")
            del y
            garbage.append(gc.collect())
        assert 0 in garbage  # tracing, compiling and tables that let go of old programs make cycles now and then
    finally:
        gc.enable()
