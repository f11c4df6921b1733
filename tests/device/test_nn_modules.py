"""Moving modules and tensors between devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def test_moving_a_module_keeps_its_parameters():
    module = nn.Linear(4, 4)
    weight = module.weight
    module(torch.ones(1, 4)).sum().backward()
    gradient = weight.grad.clone()
    module.to("tpu")
    assert module.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert weight.device.type == "tpu"
    assert torch.equal(weight.grad.cpu(), gradient)
    module.cpu()
    assert module.weight is weight
    assert weight.device.type == weight.grad.device.type == "cpu"


def test_an_optimizer_made_before_the_move_still_works():
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.to("tpu")
    before = module.bias.detach().cpu()
    module(torch.ones(1, 4, device="tpu")).sum().backward()
    optimizer.step()
    assert torch.allclose(module.bias.cpu(), before - 1)


def test_tied_weights_stay_tied():
    module = nn.Module()
    module.one, module.two = nn.Linear(4, 4), nn.Linear(4, 4)
    module.two.weight = module.one.weight
    module.to("tpu")
    assert module.two.weight is module.one.weight
    module.to(torch.bfloat16)
    assert module.two.weight is module.one.weight


def test_generated_methods():
    assert torch.ones(2).tpu().is_tpu
    assert nn.Linear(2, 2).tpu().weight.is_tpu
    assert not torch.ones(2).is_tpu


def test_swapping_tensors_on_conversion():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = nn.Linear(4, 4)
        weight = module.weight
        module.to("tpu")
        assert module.weight is weight
        assert weight.device.type == "tpu"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_meta_module_to_the_device():
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    module = module.to_empty(device="tpu")
    module.reset_parameters()
    assert module.weight.device.type == "tpu"
    assert module.weight.std() > 0


def test_default_device():
    with torch.device("tpu"):
        assert torch.ones(2).device.type == "tpu"
        assert nn.Linear(2, 2).weight.device.type == "tpu"
        assert torch.tensor([1, 2]).device.type == "tpu"
        assert torch.randperm(4).device.type == "tpu"
    torch.set_default_device("tpu")
    try:
        assert torch.ones(2).device.type == "tpu"
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).device.type == "cpu"


@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_between_devices(non_blocking):
    x = torch.randn(3, 4)
    on_device = x.to("tpu", non_blocking=non_blocking)
    assert torch.equal(on_device.to("cpu", non_blocking=non_blocking), x)
    assert torch.equal(on_device.t().to("cpu", torch.float64, non_blocking=non_blocking), x.t().double())
    target = torch.empty(3, 4)
    assert torch.equal(target.copy_(on_device, non_blocking=non_blocking), x)


def test_a_device_that_is_not_there():
    for make in (
        lambda: torch.empty(2, device="tpu:1"),
        lambda: torch.ones(2, device="tpu:1"),
        lambda: torch.tensor([1.0], device="tpu:1"),
        lambda: torch.ones(2).to("tpu:1"),
        lambda: torch.ones(2, device="tpu").to("tpu:1"),
        lambda: torch.Generator("tpu:1"),
        lambda: torch.UntypedStorage(4, device="tpu:1"),
        lambda: torch.tpu.set_device(1),
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.tpu.synchronize("tpu:1"),
    ):
        with pytest.raises(RuntimeError, match="invalid device tpu:1"):
            make()


def test_the_local_rank_names_the_one_device(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    torch.tpu.set_device("tpu:1")
    torch.tpu.set_device(torch.device("tpu", 1))
    assert torch.tpu.current_device() == 0
    assert torch.tpu._utils._get_device_index("tpu:1") == 0
    with pytest.raises(RuntimeError, match="invalid device tpu:2"):
        torch.tpu.set_device(2)


def test_tensors_may_be_made_on_the_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torch.ones(2, device="tpu:1").device == torch.device("tpu:0")
    assert torch.ones(2).to("tpu:1").device == torch.device("tpu:0")
    assert nn.Linear(2, 2).to("tpu:1").weight.device == torch.device("tpu:0")


def test_copies_of_conjugate_and_negative_views():
    x = torch.randn(3, 2)
    z = torch.view_as_complex(x)
    on_device = torch.view_as_complex(x.to("tpu"))
    assert torch.equal(on_device.conj().cpu(), z.conj())
    assert torch.equal(on_device.conj().clone().cpu(), z.conj().clone())
    assert torch.equal((on_device.conj() * 2j).cpu(), z.conj() * 2j)
    assert torch.equal(on_device.conj().imag.cpu(), z.conj().imag)
    assert torch.equal(on_device.conj().imag.clone().cpu(), z.conj().imag)
    assert torch.equal(z.conj().to("tpu").cpu(), z.conj())


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "pin_memory": True}, {"pin_memory": True}]
)
def test_data_loader(options):
    x, y = torch.randn(8, 3), torch.arange(8)
    torch.ones(1, device="tpu").cpu()
    batches = list(DataLoader(TensorDataset(x, y), batch_size=4, **options))
    assert torch.equal(torch.cat([batch.to("tpu", non_blocking=True).cpu() for batch, _ in batches]), x)
    assert torch.equal(torch.cat([labels.to("tpu").cpu() for _, labels in batches]), y)
    assert batches[0][0].is_pinned() == options.get("pin_memory", False)
