"""Ranks that call different things, come late or die: every other rank gets an error that says so, and nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from tests.distributed.world import World, world


def failure(function) -> str:
    """The error of a call, or of reading what it computes."""

    def call_and_read() -> None:
        function()
        torch.tpu.synchronize()

    with pytest.raises(RuntimeError) as caught:
        call_and_read()
    return str(caught.value)


def good(steps: int) -> None:
    x = torch.ones(4, device="tpu")
    for _ in range(steps):
        dist.all_reduce(x)
        x *= 0.5
    assert x.tolist() == [1.0] * 4


def other_operator() -> str:
    good(3)
    x = torch.ones(4, device="tpu")
    if dist.get_rank() == 0:
        return failure(lambda: dist.all_reduce(x))
    return failure(lambda: dist.broadcast(x, 0))


def known_operator_of_another_order() -> str:
    """Nothing is new here: who waits long asks."""
    x, y = torch.ones(4, device="tpu"), torch.ones(6, device="tpu")
    for t in (x, y):
        dist.all_reduce(t)
    good(20)
    return failure(lambda: dist.all_reduce(x if dist.get_rank() == 0 else y))


def other_dtype() -> str:
    x = torch.ones(4, device="tpu", dtype=torch.float32 if dist.get_rank() else torch.int32)
    return failure(lambda: dist.all_reduce(x))


def other_reduction() -> str:
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    return failure(lambda: dist.all_reduce(torch.ones(4, device="tpu"), op))


CASES = {
    other_operator: ("all_reduce(float32[4], sum)", "broadcast(float32[4], from 0)"),
    known_operator_of_another_order: ("all_reduce(float32[4], sum)", "all_reduce(float32[6], sum)"),
    other_dtype: ("all_reduce(int32[4], sum)", "all_reduce(float32[4], sum)"),
    other_reduction: ("all_reduce(float32[4], sum)", "all_reduce(float32[4], max)"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_rank_names_both_calls_and_lines(two: World, case) -> None:
    for rank, said in enumerate(two.run(case)):
        for other, title in enumerate(CASES[case]):
            assert f"rank {other} calls {title} at {__file__}:" in said, said
        assert f"rank {rank} calls {CASES[case][rank]}" in said
        assert "when-ranks-disagree.md" in said
    two.renew()


def stays_broken() -> tuple[str, str]:
    first = other_reduction()
    return first, failure(lambda: dist.all_reduce(torch.ones(4, device="tpu")))


def test_a_group_whose_ranks_differed_is_of_no_more_use(two: World) -> None:
    for first, second in two.run(stays_broken):
        assert "No more collectives of this group can run" in second
        assert first.partition(", called at")[0] in second
    two.renew()


def late_once() -> None:
    """A rank that is slow is no error, though the other one asks after it."""
    good(10)
    x = torch.ones(4, device="tpu")
    if dist.get_rank() == 1:
        time.sleep(4)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4
    good(10)


def test_a_rank_that_is_late(two: World) -> None:
    two.run(late_once, limit=100)


def other_graph() -> str:
    group = dist.group.WORLD
    x = torch.ones(4, device="tpu")
    if dist.get_rank() == 0:
        return failure(lambda: torch.compile(lambda t: fc.all_reduce(t, "sum", group) + 1)(x))
    return failure(lambda: torch.compile(lambda t: fc.all_gather_single(t, 0, group) + 1)(x))


def test_graphs_that_differ_raise_before_they_run(two: World) -> None:
    for rank, said in enumerate(two.run(other_graph)):
        assert f"rank {rank} compiles a program that communicates at" in said, said
        assert f"rank {1 - rank} another one at {__file__}:" in said
    two.renew()


def absent(folder: str) -> str:
    if dist.get_rank() == 1:
        while not (Path(folder) / "rank 0 has failed").exists():
            time.sleep(0.1)
        return ""
    said = failure(lambda: dist.all_reduce(torch.ones(4, device="tpu")))
    (Path(folder) / "rank 0 has failed").touch()
    return said


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    with world(2, timeout=5.0) as processes:
        said, _ = processes.run(absent, str(tmp_path))
        assert "rank 1 did not come within 5 s to collective 1 of this group" in said, said


def one_dies(victim: int) -> str:
    good(2)
    x = torch.ones(1000, device="tpu")
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: [dist.all_reduce(x), x.sum().item()])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_an_error_of_the_others(victim: int) -> None:
    with world(2, timeout=1800.0) as processes:  # nobody waits that long
        outcomes = processes.outcomes(one_dies, victim)
        assert outcomes[victim] == (False, f"ended with exit code {-signal.SIGKILL}")
        is_ok, said = outcomes[1 - victim]
        assert is_ok, said
        assert "all_reduce(float32[1000], sum), called at" in said


def one_dies_in_a_graph(victim: int) -> str:
    group = dist.group.WORLD
    compiled = torch.compile(lambda t: fc.all_reduce(t, "sum", group) * 0.5)
    x = compiled(torch.ones(1000, device="tpu"))
    assert x.sum().item() == 1000.0
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(lambda: compiled(x).sum().item())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_a_graph(victim: int) -> None:
    """Rank 0 too: XLA's service is a process of its own, which ends behind the last rank."""
    with world(2, timeout=1800.0) as processes:
        is_ok, said = processes.outcomes(one_dies_in_a_graph, victim)[1 - victim]
        assert is_ok, said
        assert "the tpu device failed at" in said


INTERRUPTED = """
import sys, torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
if sys.argv[1] == "recv":
    import os, subprocess
    # The other rank is there, and never sends.
    other = subprocess.Popen([sys.executable, __file__, "other", str(store.port)])
    dist.init_process_group("tpu_dist", store=dist.PrefixStore("x", store), rank=0, world_size=2)
    x = torch.zeros(2, device="tpu")
    dist.recv(x, 1)
    print("waits", flush=True)
    try:
        x.sum().item()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        other.kill()
        os._exit(0)
else:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]))
    dist.init_process_group("tpu_dist", store=dist.PrefixStore("x", store), rank=1, world_size=2)
    import time
    time.sleep(100)
"""


def test_ctrl_c_ends_waiting(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(script), "recv"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            time.sleep(1)
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(60) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def checked_always() -> None:
    good(30)
    x = torch.ones(2, device="tpu")
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("said", ["always", "7", "off"])
def test_how_often_ranks_are_compared(said: str) -> None:
    with world(2, environment={"TORCH_TPU_CHECK_COLLECTIVES": said}) as processes:
        processes.run(checked_always)
        keys = processes.store_keys("call/")
        # A rank deletes its last question when it asks the next one.
        assert (len(keys) == 0) == (said == "off"), keys
        assert len(keys) <= 4
