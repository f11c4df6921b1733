"""Groups: how they are made and named, sub-groups, sends and receives, objects, barriers, futures, their end."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.world import World, world


def check_peers() -> None:
    rank = dist.get_rank()
    other = 1 - rank
    x = torch.arange(5, device="tpu") + 10 * rank
    got = torch.zeros(5, dtype=torch.int64, device="tpu")
    if rank == 0:
        dist.send(x, 1)  # returns before rank 1 receives
        dist.recv(got, 1)
    else:
        dist.send(x, 0)
        assert dist.recv(got) == 0  # of any rank
    assert got.tolist() == [10 * other + n for n in range(5)]
    rows = torch.zeros(2, 5, dtype=torch.bfloat16, device="tpu")
    ops = [
        dist.P2POp(dist.irecv, rows[1], other, tag=7),
        dist.P2POp(dist.isend, x.bfloat16(), other, tag=7),
        dist.P2POp(dist.isend, x.bfloat16() + 1, other, tag=8),
        dist.P2POp(dist.irecv, rows[0], other, tag=8),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert rows.tolist() == [[10.0 * other + n + 1 for n in range(5)], [10.0 * other + n for n in range(5)]]
    x = torch.ones(4, device="tpu")
    work = dist.isend(x, other)
    x += 1  # what was sent is what it was
    got = torch.zeros(4, device="tpu")
    dist.irecv(got, other).wait()
    work.wait(datetime.timedelta(seconds=30))
    assert got.tolist() == [1.0] * 4


def test_sends_and_receives(two: World) -> None:
    two.run(check_peers)


def check_late_peer() -> None:
    """Rank 1 comes to what rank 0 has called only when that has gone on."""
    store = dist.distributed_c10d._get_default_store()
    x, y = torch.ones(3, device="tpu"), torch.zeros(3, device="tpu")
    z = torch.full((3,), 2.0, device="tpu")
    if dist.get_rank() == 1:
        store.wait(["rank 0 went on"], datetime.timedelta(seconds=60))
    works = [dist.isend(x, 1 - dist.get_rank()), dist.irecv(y, 1 - dist.get_rank()), dist.all_reduce(z, async_op=True)]
    for work in works:
        work.wait()
    dist.all_reduce(z)  # of what is not there yet
    assert (x * 2).sum().item() == 6.0
    if dist.get_rank() == 0:
        assert not works[1].is_completed()
        store.set("rank 0 went on", "")
    assert y.tolist() == [1.0] * 3
    assert z.tolist() == [8.0] * 3


def test_nobody_waits_before_a_value_is_needed(two: World) -> None:
    two.run(check_late_peer)


def check_fused() -> None:
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        x = torch.arange(4.0, device="tpu") + dist.get_rank()
        y = x * 2
        dist.all_reduce(y)
        z = (y + 1) * x
        dist.all_reduce(z[:2])
        w = z.sum()
        assert w.item() == sum((2 * (2 * n + 1) + 1) * (n + dist.get_rank()) for n in (2, 3)) + sum(
            (2 * (2 * n + 1) + 1) * (2 * n + 1) for n in (0, 1)
        )


def test_fused_eager(two: World) -> None:
    two.run(check_fused)


def check_handles() -> None:
    x = torch.ones(3, device="tpu")
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().tolist() == [20.0] * 3
    work.wait(datetime.timedelta(seconds=30))
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is x
    torch.tpu.synchronize()
    y = torch.ones(3, device="tpu")
    dist.all_reduce(y, async_op=True)
    torch.tpu.synchronize()
    assert y.untyped_storage().value.graph is None  # it has arrived
    dist.barrier()
    dist.barrier(async_op=True).wait()
    got: list[object] = [None, None]
    dist.all_gather_object(got, {"rank": dist.get_rank()})
    assert got == [{"rank": 0}, {"rank": 1}]
    names = [f"of {dist.get_rank()}"]
    dist.broadcast_object_list(names, src=1)
    assert names == ["of 1"]
    mixed = torch.ones(2)
    dist.all_reduce(mixed)  # a tensor of the CPU, in the same group
    assert mixed.tolist() == [2.0, 2.0]


def test_handles_objects_barriers_and_tensors_of_the_cpu(two: World) -> None:
    two.run(check_handles)


def check_subgroups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2]), dist.new_group([2, 3, 1])]
    x = torch.full((2,), 10.0**rank, device="tpu")
    mine = pairs[0] if rank in (0, 3) else pairs[1]
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [1001.0 if rank in (0, 3) else 110.0] * 2
    if rank:
        y = torch.tensor(float(rank), device="tpu")
        dist.broadcast(y, 3, group=pairs[2])
        assert y.item() == 3.0
        assert dist.get_group_rank(pairs[2], rank) == rank - 1
    split = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    z = torch.tensor([rank], device="tpu")
    both = torch.empty(2, dtype=torch.int64, device="tpu")
    dist.all_gather_single(both, z, group=split)
    assert both.tolist() == ([0, 1] if rank < 2 else [2, 3])
    dist.destroy_process_group(pairs[0] if rank in (0, 3) else pairs[1])
    dist.destroy_process_group(split)
    mesh = dist.device_mesh.init_device_mesh("tpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.tensor(float(rank), device="tpu")
    dist.all_reduce(x, group=mesh["a"].get_group())
    assert x.item() == {0: 2.0, 1: 4.0, 2: 2.0, 3: 4.0}[rank]
    if rank < 2:  # other ranks need not come
        for _ in range(3):
            dist.all_reduce(x, group=mesh["b"].get_group())
        assert x.item() == 24.0
    dist.barrier()


def test_any_subgroup_of_four() -> None:
    with world(4) as four:
        four.run(check_subgroups)


def chosen_each() -> list[str]:
    store, rank, size = next(iter(dist.rendezvous("env://")))
    found = []
    for n, backend in enumerate((None, "tpu_dist", "tpu", "tpu:tpu_dist", "cpu:gloo,tpu:tpu_dist")):
        # A store keeps the keys of a group that is gone.
        own = dist.PrefixStore(str(n), store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
        found.append(type(dist.group.WORLD).__name__)
        x, y = torch.ones(2, device="tpu"), torch.ones(2)
        dist.all_reduce(x)
        dist.all_reduce(y)
        assert x.tolist() == y.tolist() == [2.0, 2.0]
        dist.destroy_process_group()
    return found


def test_names_of_the_backend_and_groups_made_anew() -> None:
    with world(2, backend="") as processes:
        assert processes.run(chosen_each) == [["TpuProcessGroup"] * 5] * 2


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group()
x = torch.ones(2, device="tpu") * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", x.tolist(), flush=True)
if dist.get_rank() == 0:
    dist.send(x + 1, 1)  # the last thing this process does
else:
    import time; time.sleep(1)
    dist.recv(x, 0)
    print("received", x.tolist(), flush=True)
"""


PAGE = Path(__file__).parents[2] / "docs/user/distributed.md"


def torchrun(folder: Path, code: str) -> str:
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_torchrun_and_a_message_sent_at_the_end(tmp_path: Path) -> None:
    printed = torchrun(tmp_path, SCRIPT)
    assert printed.count("sum [3.0, 3.0]") == 2
    assert printed.count("received [4.0, 4.0]") == 1


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    printed = torchrun(tmp_path, f"{code}print(model.module.weight.grad.norm().item())\n")
    first, second = map(float, printed.split())
    assert first == second > 0


def test_importing_torch_imports_nothing_of_the_groups() -> None:
    code = (
        "import sys, torch; print([m for m in sys.modules if m.startswith('torch_tpu.distributed')]);"
        "print('tpu_dist' in torch.distributed.Backend.backend_list, 'jaxlib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded, registered = ran.stdout.splitlines()
    assert loaded == "['torch_tpu.distributed', 'torch_tpu.distributed.backend_names']"
    assert registered == "True False"


def check_functional() -> None:
    import torch.distributed._functional_collectives as fc

    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.arange(8.0).view(4, 2) + 10 * rank
    for function in (
        lambda t: fc.all_reduce(t, "sum", group),
        lambda t: fc.all_gather_single(t, 0, group),
        lambda t: fc.all_gather_single(t, 1, group),
        lambda t: fc.reduce_scatter_single(t, "avg", 0, group),
        lambda t: fc.all_to_all_single(t, None, None, group),
        lambda t: fc.all_to_all_single(t, [3, 3] if rank else [1, 1], [1, 3], group),
        lambda t: fc.broadcast(t, 1, group),
        lambda t: torch.cat(fc.all_reduce_coalesced([t, t + 1], "max", group)),
        lambda t: torch.cat(fc.all_gather_single_coalesced([t, t + 1], group)),
        lambda t: torch.cat(fc.reduce_scatter_single_coalesced([t, t + 1], "sum", [0, 0], group)),
        lambda t: torch.ops._c10d_functional.all_reduce_(t.clone(), "min", group.group_name),
        lambda t: torch.ops._c10d_functional.broadcast_(t.clone(), 0, group.group_name),
    ):
        expected, found = fc.wait_tensor(function(x)) + 0, fc.wait_tensor(function(x.to("tpu"))) + 0
        assert torch.equal(expected, found.cpu()), (expected, found)
    w = x.to("tpu").requires_grad_()
    (fc.all_gather_single_autograd(w, 0, group) ** 2).sum().backward()
    assert torch.equal(w.grad.cpu(), 2 * 2 * x)


def test_functional_collectives(two: World) -> None:
    two.run(check_functional)
