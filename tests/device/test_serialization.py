"""Saving, loading, pickling and copying tensors and modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn


def saved(obj, **options):
    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("map_location", [None, "cpu", "tpu", "tpu:0", torch.device("tpu"), {"tpu:0": "cpu"}])
@pytest.mark.parametrize("zipped", [True, False])
def test_save_and_load(weights_only, map_location, zipped):
    module = nn.Linear(4, 8).to("tpu")
    state = dict(module.state_dict(), view=module.weight.detach()[1:3])
    buffer = saved(state, _use_new_zipfile_serialization=zipped)
    loaded = torch.load(buffer, weights_only=weights_only, map_location=map_location)
    expected_device = "cpu" if map_location in ("cpu", {"tpu:0": "cpu"}) else "tpu"
    for name, tensor in state.items():
        assert loaded[name].device.type == expected_device
        assert torch.equal(loaded[name].cpu(), tensor.cpu())
    assert loaded["view"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()


def test_a_cpu_checkpoint_loads_onto_the_device():
    x = torch.randn(3)
    assert torch.equal(torch.load(saved({"x": x}), map_location="tpu")["x"].cpu(), x)


def test_a_mapped_file_loads_onto_the_device(tmp_path):
    x = torch.randn(3)
    torch.save({"x": x, "y": x.to("tpu")}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="tpu", mmap=True)
    assert torch.equal(loaded["x"].cpu(), x)
    assert torch.equal(loaded["y"].cpu(), x)


@pytest.mark.parametrize("zipped", [True, False])
def test_saving_to_a_file(tmp_path, zipped):
    x = torch.randn(3)
    torch.save(x.to("tpu"), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert torch.equal(torch.load(tmp_path / "x.pt").cpu(), x)


def test_loading_for_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="invalid device tpu:1"):
        torch.load(saved(torch.ones(2)), map_location="tpu:1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_pickle(dtype):
    x = torch.randn(3, 4).to(dtype)
    unpickled = pickle.loads(pickle.dumps(x.to("tpu")))
    assert unpickled.device.type == "tpu"
    assert torch.equal(unpickled.cpu(), x)


def test_pickling_a_transposed_tensor_keeps_its_strides():
    x = torch.randn(3, 4).t()
    unpickled = pickle.loads(pickle.dumps(x.to("tpu")))
    assert unpickled.stride() == x.stride()
    assert torch.equal(unpickled.cpu(), x)


def test_deepcopy_of_a_module():
    module = nn.Linear(4, 8).to("tpu")
    copied = copy.deepcopy(module)
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.weight.data_ptr() != module.weight.data_ptr()
    with torch.no_grad():
        copied.weight.add_(1)
    assert torch.allclose(copied.weight.cpu(), module.weight.cpu() + 1)


def test_deepcopy_keeps_shared_storages():
    x = torch.arange(4.0).to("tpu")
    base, view = copy.deepcopy([x, x[1:]])
    base.fill_(7)
    assert view.tolist() == [7, 7, 7]
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("assign", [True, False])
def test_state_dict(assign):
    source, target = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)) for _ in range(2))
    target.to("tpu")
    state = {name: tensor.to("tpu") for name, tensor in source.state_dict().items()}
    target.load_state_dict(state, assign=assign)
    for name, tensor in target.state_dict().items():
        assert tensor.device.type == "tpu"
        assert torch.equal(tensor.cpu(), source.state_dict()[name])


def test_state_dict_from_the_cpu():
    source, target = nn.Linear(4, 8), nn.Linear(4, 8).to("tpu")
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.cpu(), source.weight)


def test_optimizer_state_round_trip():
    module = nn.Linear(4, 2).to("tpu")
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4, device="tpu")).sum().backward()
    optimizer.step()
    loaded = torch.load(saved(optimizer.state_dict()))
    other = torch.optim.AdamW(module.parameters())
    other.load_state_dict(loaded)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert theirs["exp_avg"].device.type == "tpu"
        assert torch.equal(mine["exp_avg"].cpu(), theirs["exp_avg"].cpu())
