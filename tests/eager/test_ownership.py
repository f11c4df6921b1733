"""Threads beside writers whose programs take the memory of what they write: each sees the value before or after."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

MODES = {mode.value: mode for mode in torch.tpu.EagerMode}
SIZE = 1 << 12


@pytest.fixture(params=list(MODES))
def mode(request) -> Iterator[str]:
    with torch.tpu.set_eager_mode(MODES[request.param]):
        yield request.param


@pytest.fixture(params=[5e-3, 2e-5], ids=["slow_switches", "fast_switches"])
def switches(request) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


def beside(write: Callable[[], None], *reads: Callable[[], None]) -> None:
    """Runs `write` once with each of `reads` again and again in a thread of its own; raises what any of them raises."""
    done = threading.Event()

    def again(read: Callable[[], None]) -> int:
        count = 0
        while not done.is_set():
            read()
            count += 1
        return count

    with ThreadPoolExecutor(len(reads)) as pool:
        futures = [pool.submit(again, read) for read in reads]
        try:
            write()
        finally:
            done.set()
        for future in futures:
            future.result()


def of_one_write(t: torch.Tensor) -> None:
    """All elements of a tensor that is only ever written as a whole are equal, and at least 1."""
    host = t.cpu()
    assert host.min() == host.max() >= 1, f"between {host.min()} and {host.max()}"


def test_readers_beside_in_place_writers(mode: str, switches: None) -> None:
    x, one = torch.ones(SIZE, device="tpu"), torch.ones(SIZE, device="tpu")

    def write() -> None:
        for _ in range(400):
            x.add_(one)

    def read_parts() -> None:
        assert x[: SIZE // 2].sum().item() >= SIZE // 2
        of_one_write(x.clone())

    beside(write, lambda: of_one_write(x), read_parts)
    assert x.eq(401).all().item()


def test_a_long_run_of_one_writer() -> None:
    x = torch.ones(64, device="tpu")

    def write() -> None:
        for _ in range(10_000):
            x.add_(1)

    beside(write, lambda: of_one_write(x))
    assert x.eq(10_001).all().item()


def test_state_dict_beside_an_optimizer(mode: str, switches: None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    counter = torch.ones(SIZE, device="tpu")
    data = torch.randn(8, 16).to("tpu")

    def train() -> None:
        for _ in range(60):
            model(data).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counter.add_(1)

    def copy() -> None:
        assert all(t.cpu().isfinite().all() for t in model.state_dict().values())
        for entry in list(optimizer.state.values()):
            assert all(t.cpu().isfinite().all() for t in list(entry.values()))
        of_one_write(counter)

    beside(train, copy)
    assert model[1].num_batches_tracked.item() == 60
    assert counter.eq(61).all().item()


def test_a_compiled_step_that_takes_its_cache(mode: str, switches: None) -> None:
    cache = torch.ones(8, SIZE, device="tpu")

    @torch.compile(backend="tpu")
    def step(new: torch.Tensor) -> torch.Tensor:
        cache.add_(new)
        return cache.sum(1)

    step(torch.zeros(SIZE, device="tpu"))
    one = torch.ones(SIZE, device="tpu")

    def write() -> None:
        for _ in range(100):
            step(one)

    def read_a_row() -> None:
        of_one_write(cache[3])

    beside(write, read_a_row, lambda: of_one_write(cache))
    assert cache.eq(101).all().item()


def test_flushes_beside_a_writer(mode: str, switches: None) -> None:
    x = torch.ones(SIZE, device="tpu")

    def write() -> None:
        for _ in range(200):
            x.mul_(2)
            x.sub_(1)

    def look() -> None:
        torch.tpu.synchronize()
        gc.collect(0)
        of_one_write(x)

    beside(write, look)
    assert x.eq(1).all().item()


def test_writers_of_separate_parts(mode: str, switches: None) -> None:
    """On the CPU these threads have nothing in common; here they write the same storage."""
    x = torch.zeros(4, 32, device="tpu")

    def write(row: int) -> None:
        for _ in range(100):
            x[row] += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert x.eq(100).all().item()


def test_writers_of_what_the_others_read(mode: str, switches: None) -> None:
    """x += y beside y += x, each of which waits for the other."""
    x, y = torch.ones(32, device="tpu"), torch.ones(32, device="tpu")

    def write(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(200):
            target.add_(source).clamp_(1, 5)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(write, x, y), pool.submit(write, y, x)]
        for future in futures:
            future.result(timeout=120)
    assert x.eq(5).all().item()
    assert y.eq(5).all().item()


def test_the_first_read_of_empty_memory_writes_nothing(mode: str, switches: None) -> None:
    for _ in range(30):
        x = torch.empty(64, device="tpu")
        beside(lambda x=x: x.fill_(1), lambda x=x: x.cpu())
        assert x.eq(1).all().item()


def test_a_check_is_raised_where_the_call_was_made() -> None:
    with torch.tpu.set_eager_mode(MODES["fused"]):
        table = torch.arange(4.0, device="tpu")
        asked, read = threading.Event(), threading.Event()
        found = []

        def wrong() -> None:
            found.append(table[torch.tensor([9], device="tpu")])
            asked.set()
            read.wait()
            with pytest.raises(IndexError):
                torch.tpu.synchronize()

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(wrong)
            asked.wait()
            found[0].cpu()
            torch.tpu.synchronize()
            read.set()
            future.result()


def test_a_check_of_a_thread_that_has_ended_is_not_lost() -> None:
    with torch.tpu.set_eager_mode(MODES["fused"]):
        table = torch.arange(4.0, device="tpu")
        kept = []
        thread = threading.Thread(target=lambda: kept.append(table[torch.tensor([9], device="tpu")]))
        thread.start()
        thread.join()
        with pytest.raises(IndexError):
            torch.tpu.synchronize()


def test_memory_is_counted_once_beside_readers() -> None:
    x = torch.ones(SIZE, device="tpu")
    torch.tpu.synchronize()
    gc.collect()  # what other tests left
    before = torch.accelerator.memory_allocated()

    def write() -> None:
        for _ in range(300):
            x.add_(1)

    beside(write, lambda: of_one_write(x), lambda: x.sum().item())
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
