"""DDP, FSDP2 and tensor parallelism on two processes train as one process does, and as gloo does on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.models import batch, gpt, loss_of, train
from tests.distributed.world import World

STEPS = 6


def close(found: list[float], expected: list[float], tolerance: float = 2e-5) -> None:
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < tolerance, (found, expected)


def alone(steps: int = STEPS, **options: Any) -> list[float]:
    return train(gpt(), "cpu", steps, **options)


def check_ddp(steps: int, **options: Any) -> None:
    share = dist.get_rank(), 2
    model = DistributedDataParallel(gpt().to("tpu"), **options)
    close(train(model, "tpu", steps, share), alone(steps))


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True, "gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.002}],
    ids=["plain", "static graph and bucket views", "small buckets"],
)
def test_ddp(two: World, options: dict[str, Any]) -> None:
    two.run(_with, check_ddp, STEPS, options)


def _with(function: Any, steps: int, options: dict[str, Any]) -> None:
    function(steps, **options)


def check_unused() -> None:
    """Each rank leaves out a layer in other steps; equal to gloo on the CPU."""
    rank = dist.get_rank()

    def options(step: int) -> dict[str, Any]:
        return {"with_extra": (step + rank) % 3 == 0}

    losses = []
    for device in ("cpu", "tpu"):
        model = DistributedDataParallel(gpt(unused=True).to(device), find_unused_parameters=True)
        losses.append(train(model, device, STEPS, (rank, 2), options))
    close(*losses)


def test_ddp_with_unused_parameters(two: World) -> None:
    two.run(check_unused)


def check_no_sync() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(gpt().to("tpu"))
    reference = gpt()
    for step in range(2):
        with model.no_sync():
            loss_of(model, batch(step).chunk(2)[rank].to("tpu")).backward()
        loss_of(reference, batch(step)).backward()
    loss_of(model, batch(2).chunk(2)[rank].to("tpu")).backward()
    loss_of(reference, batch(2)).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)

    def halved(state, bucket):  # PyTorch compares annotations with classes
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / 2)

    hooked = DistributedDataParallel(gpt().to("tpu"))
    hooked.register_comm_hook(None, halved)
    loss_of(hooked, batch(0).chunk(2)[rank].to("tpu")).backward()
    reference = gpt()
    loss_of(reference, batch(0)).backward()
    for a, b in zip(hooked.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


def test_ddp_accumulates_and_takes_a_hook(two: World) -> None:
    two.run(check_no_sync)


def sharded(model: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh("tpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def check_fsdp(steps: int) -> None:
    share = dist.get_rank(), 2
    close(train(sharded(gpt().to("tpu")), "tpu", steps, share), alone(steps))
    close(train(sharded(gpt().to("tpu"), reshard_after_forward=False), "tpu", 3, share, clip=0.1), alone(3, clip=0.1))


def test_fsdp2_and_clipping(two: World) -> None:
    two.run(check_fsdp, STEPS)


def check_fsdp_options() -> None:
    rank = dist.get_rank()
    with torch.device("meta"):
        empty = gpt()
    empty = sharded(empty)
    empty.to_empty(device="tpu")
    full = gpt().state_dict()
    for name, parameter in empty.named_parameters():
        whole = dist.tensor.distribute_tensor(full[name].to("tpu"), parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(whole)
    close(train(empty, "tpu", 3, (rank, 2)), alone(3))
    low = sharded(gpt().to("tpu"), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    low.set_gradient_divide_factor(2.0)
    close(train(low, "tpu", 3, (rank, 2)), alone(3), 0.05)
    assert all(p.dtype is torch.float32 for p in low.parameters())
    model, reference = sharded(gpt().to("tpu")), gpt()
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        loss_of(model, batch(step).chunk(2)[rank].to("tpu")).backward()
        loss_of(reference, batch(step)).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor().cpu(), b.grad, rtol=1e-4, atol=1e-5)


def test_fsdp2_from_meta_in_bfloat16_and_accumulating(two: World) -> None:
    two.run(check_fsdp_options)


def check_tensor_parallel(steps: int) -> None:
    model = gpt().to("tpu")
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
        "out": RowwiseParallel(),
        "down": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, init_device_mesh("tpu", (2,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step).to("tpu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    close(losses, alone(steps))


def test_tensor_parallelism(two: World) -> None:
    two.run(check_tensor_parallel, STEPS)


def check_checkpoint(folder: str) -> None:
    share = dist.get_rank(), 2
    model = sharded(gpt().to("tpu"))
    train(model, "tpu", 1, share)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    before = get_model_state_dict(model, options=options)
    train(model, "tpu", 1, share)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    after = get_model_state_dict(model, options=options)
    alone = {"model": gpt().state_dict()}
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    if dist.get_rank() == 0:
        for name, value in before.items():
            assert torch.equal(value, after[name])
            assert torch.equal(value, alone["model"][name])


def test_checkpoint_of_two_is_read_by_two_and_by_one(two: World, tmp_path: Path) -> None:
    two.run(check_checkpoint, str(tmp_path))


@pytest.mark.rare
def test_twenty_steps(two: World) -> None:
    two.run(check_ddp, 20)
    two.run(check_fsdp, 20)
    two.run(check_tensor_parallel, 20)
