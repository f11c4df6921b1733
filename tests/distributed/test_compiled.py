"""Collectives inside compiled graphs, and the engine that makes a program of each eager one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import test_collectives as collectives
from tests.distributed.models import gpt, train
from tests.distributed.test_training import alone, close, sharded
from tests.distributed.world import World, world
from torch_tpu import hooks, metrics


def computed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    h = torch.relu(x @ w)
    total = fc.all_reduce(h, "sum", group)
    rows = fc.all_gather_single(h, 0, group)
    mine = fc.reduce_scatter_single(rows * total.repeat(2, 1), "avg", 0, group)
    swapped = fc.all_to_all_single(mine, None, None, group)
    most, least = fc.all_reduce_coalesced([h, h], "max", group), fc.all_reduce(h, "min", group)
    return fc.wait_tensor(swapped) * 2 + fc.broadcast(h, 1, group) + most[0] - least


def check_graph() -> int:
    """One program; equal to gloo on the CPU; again with other data; tensors from before keep their values."""
    rank = dist.get_rank()
    before = torch.arange(6.0, device="tpu") * 2
    view = before[2:4]
    programs: list[Any] = []
    hooks.graph_program_made = lambda _, plan: programs.append(plan)
    compiled = torch.compile(computed, fullgraph=True, dynamic=False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        with torch.tpu.set_eager_mode(list(torch.tpu.EagerMode)[seed % 2]):
            found = compiled(x.to("tpu"), w.to("tpu")).cpu()
        torch.testing.assert_close(found, computed(x, w), rtol=1e-5, atol=1e-5)
    assert len(programs) == 1
    assert programs[0].ranks == (0, 1)
    kinds = {name for name, _ in programs[0].operations}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert metrics.counters().get("graph_by_operator", 0) == 0
    view += 1
    before *= 2
    assert before.tolist() == [0.0, 4.0, 10.0, 14.0, 16.0, 20.0]
    return rank


def check_gradients() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = fc.all_gather_single_autograd(x @ w, 0, group)
        return (gathered**2).sum() + fc.reduce_scatter_tensor_autograd(x @ w, "sum", 0, group).sum()

    x, w = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)), torch.eye(8) + 0.5
    gradients = []
    for device, run in (("cpu", loss), ("tpu", torch.compile(loss, fullgraph=True))):
        v = w.detach().to(device).requires_grad_()
        run(x.to(device), v).backward()
        gradients.append(v.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def check_compiled_training() -> None:
    share = dist.get_rank(), 2
    torch._dynamo.reset()
    close(train(torch.compile(DistributedDataParallel(gpt().to("tpu"))), "tpu", 3, share), alone(3))
    model = gpt().to("tpu")
    for layer in model.layers:
        layer.compile()
    close(train(sharded(model), "tpu", 3, share), alone(3))


def test_graphs_are_programs_of_all_ranks(two: World) -> None:
    assert two.run(check_graph) == [0, 1]


def test_gradients_through_collectives(two: World) -> None:
    two.run(check_gradients)


def test_compiled_ddp_and_fsdp2(two: World) -> None:
    two.run(check_compiled_training)


def check_meshes() -> None:
    """Two groups in one graph: the program is of all ranks. One group: of that one, and the others need not come."""
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("tpu", (2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh["a"].get_group(), mesh["b"].get_group()
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0])[rank].view(1).to("tpu")

    def both(x: torch.Tensor) -> torch.Tensor:
        return fc.all_reduce(fc.all_reduce(x, "sum", a) * 2, "max", b) + fc.all_gather_single(x, 0, b).sum()

    expected = 2020.0 + (11.0 if rank < 2 else 1100.0)
    assert torch.compile(both, fullgraph=True)(x).item() == expected

    def one(x: torch.Tensor) -> torch.Tensor:
        return fc.all_reduce(x, "sum", b) + 1

    if rank < 2:
        assert torch.compile(one, fullgraph=True)(x).item() == 12.0
    dist.barrier()


def test_meshes_and_subgroups_of_four() -> None:
    with world(4) as four:
        four.run(check_meshes)


def check_programs() -> None:
    assert dist.group.WORLD.engine.__name__.endswith(".program_engine")
    collectives.check_reductions([torch.float32, torch.bfloat16], ["SUM", "AVG", "MAX"])
    collectives.check_reductions([torch.int32], ["SUM", "BXOR"])
    collectives.same(collectives.moved, torch.float32)
    collectives.check_lists()
    collectives.check_views()
    collectives.check_again()
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        collectives.check_again()


def test_eager_collectives_as_programs() -> None:
    with world(2, environment={"TORCH_TPU_COLLECTIVES": "xla"}) as processes:
        processes.run(check_programs)


def summed(ranks: list[int]) -> tuple[str, float, float]:
    """The name of a new group, and the sum of the ranks' numbers in it, 10 and 11: by a program, and in a graph."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return group_name(group), 0.0, 0.0
    x = torch.full((3,), 10.0 + dist.get_rank(), device="tpu")
    eager = fc.all_reduce(x, "sum", group).sum().item() / 3
    compiled = torch.compile(lambda x: fc.all_reduce(x, "sum", group) + 0, fullgraph=True)
    return group_name(group), eager, compiled(x)[0].item()


def group_name(group: Any) -> str:
    return str(getattr(group, "group_name", ""))


def check_a_name_of_other_ranks() -> None:
    """A later world of the same processes gives the first group's name to other ranks."""
    rank = dist.get_rank()
    first = summed([0])
    assert first[1:] == ((10.0, 10.0) if rank == 0 else (0.0, 0.0))
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("tpu_dist", store=store, rank=rank, world_size=2)
    second = summed([0, 1])
    assert second[1:] == (21.0, 21.0)
    if rank == 0:
        assert first[0] == second[0] != ""


def test_a_name_is_given_to_other_ranks_by_a_later_world_or_job(tmp_path: Path) -> None:
    """Programs are kept by the ranks they run on: a group's name is used again, here and in what is on disk."""
    environment = {"TORCH_TPU_COLLECTIVES": "xla", "TORCH_TPU_CACHE_DIR": str(tmp_path)}
    with world(2, environment=environment) as processes:
        assert [found[1:] for found in processes.run(summed, [0])] == [(10.0, 10.0), (0.0, 0.0)]
    with world(2, environment=environment) as processes:
        assert [found[1:] for found in processes.run(summed, [0, 1])] == [(21.0, 21.0)] * 2
    with world(2, environment=environment) as processes:
        processes.run(check_a_name_of_other_ranks)


def check_by_operator() -> int:
    compiled = torch.compile(lambda x: fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1)
    assert compiled(torch.ones(2, device="tpu")).tolist() == [5.0, 5.0]
    return int(metrics.counters()["graph_by_operator"])


def test_graphs_without_xla_run_by_operator() -> None:
    with world(2, environment={"TORCH_TPU_COLLECTIVES": "gloo"}) as processes:
        assert processes.run(check_by_operator) == [1, 1]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 3), (2, 6), (0, 4)])
def test_groups_of_a_mesh_dimension(ranks: tuple[int, ...]) -> None:
    from torch_tpu.hlo.replicas import translations

    groups = translations(ranks, 8)
    assert sorted(r for g in groups for r in g) == list(range(8))
    assert list(ranks) in groups
    with pytest.raises(NotImplementedError, match="no dimension of a mesh"):
        translations((0, 1, 3), 8)
