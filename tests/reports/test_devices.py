"""Reports about where tensors are: moves, copies, the default device."""

from __future__ import annotations

import copy

import torch


def test_move_is_the_same_tensor_where_nothing_changes() -> None:
    """`.to` that copies needlessly or not at all: pytorch/xla#8861, pytorch/xla#6861."""
    x = torch.ones(2, 3, device="tpu")
    assert x.to("tpu") is x
    assert x.to("tpu:0", torch.float32) is x
    assert x.to(x) is x
    assert x.float() is x
    assert x.contiguous() is x
    copied = x.to("tpu", copy=True)
    assert copied is not x
    copied.zero_()
    assert x.sum().item() == 6
    assert x.to("tpu", torch.float64).dtype is torch.float64


def test_default_device() -> None:
    """Factories that ignore the chosen device: pytorch/xla#8861."""
    with torch.device("tpu"):
        made = [torch.zeros(3), torch.tensor([1, 2]), torch.arange(2), torch.randn(2), torch.nn.Linear(2, 2).weight]
    assert {t.device.type for t in made} == {"tpu"}
    assert torch.zeros(1).device.type == "cpu"
    torch.set_default_device("tpu")
    try:
        assert torch.eye(2).device.type == "tpu"
    finally:
        torch.set_default_device(None)
    assert made[0].new_ones(2).device.type == "tpu"


def test_copies_do_not_alias_the_host() -> None:
    """A transfer that shares memory with its source: pytorch/xla#6861."""
    source = torch.arange(5.0)
    moved = source.to("tpu")
    source.add_(1)
    assert moved.tolist() == [0, 1, 2, 3, 4]
    back = moved.cpu()
    moved.zero_()
    assert back.tolist() == [0, 1, 2, 3, 4]
    back.fill_(9)
    assert moved.tolist() == [0] * 5
    array = moved.cpu().numpy()
    assert torch.equal(torch.from_numpy(array).to("tpu").cpu(), moved.cpu())


def test_copy_converts_broadcasts_and_follows_strides() -> None:
    """copy_ between devices that looks at memory instead of elements: pytorch/xla#8861."""
    x = torch.ones(2, 3, device="tpu")
    host = torch.empty(2, 3)
    host.copy_(x * 4)
    assert host.sum().item() == 24
    x.copy_(torch.arange(3, dtype=torch.float64))
    assert x.tolist() == [[0, 1, 2]] * 2
    transposed = torch.zeros(3, 2, device="tpu")
    transposed.t().copy_(x.cpu())
    assert transposed.tolist() == [[0, 0], [1, 1], [2, 2]]
    host.t().copy_(transposed)
    assert host.tolist() == x.tolist()
    wide = torch.zeros(2, 4)
    wide[:, 1:] = x.cpu()
    wide[:, :3].copy_(x)
    assert wide.tolist() == [[0, 1, 2, 2]] * 2


def test_module_made_without_memory() -> None:
    """to_empty of a meta module: pytorch/xla#8861."""
    module = torch.nn.Linear(3, 2, device="meta").to_empty(device="tpu")
    assert module.weight.device.type == "tpu"
    assert module.weight.shape == (2, 3)


def test_copy_and_deepcopy() -> None:
    """Copies that leave the device or lose what they are: pytorch/xla#876, pytorch/xla#2392, pytorch/pytorch#73216."""
    x = torch.ones(2, 3, device="tpu")
    shallow = copy.copy(x)
    shallow.fill_(2)
    assert shallow.device.type == "tpu"
    assert x.sum().item() == 12  # one storage
    deep = copy.deepcopy(x)
    deep.zero_()
    assert deep.device.type == "tpu"
    assert x.sum().item() == 12

    frozen = torch.nn.Parameter(torch.ones(2, device="tpu"), requires_grad=False)
    twin = copy.deepcopy(frozen)
    assert isinstance(twin, torch.nn.Parameter)
    assert not twin.requires_grad
    assert twin.device.type == "tpu"

    base = torch.zeros(5, device="tpu")
    nest = copy.deepcopy([base, base[2:4]])
    nest[1].fill_(7)
    assert nest[0].tolist() == [0, 0, 7, 7, 0]
    assert base.sum().item() == 0


def test_deepcopy_of_a_module_is_independent() -> None:
    """Shared parameters or buffers after deepcopy: pytorch/pytorch#73216."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to("tpu")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[1].running_var.mul_(5)
    assert module[0].weight.abs().sum().item() > 0
    assert module[1].running_var.tolist() == [1, 1, 1]
    assert {t.device.type for t in twin.state_dict().values()} == {"tpu"}
