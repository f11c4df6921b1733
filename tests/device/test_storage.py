"""`torch.UntypedStorage` on the device."""

from __future__ import annotations

import copy

import pytest
import torch


def test_a_storage_of_a_size():
    storage = torch.UntypedStorage(8, device="tpu")
    assert storage.device == torch.device("tpu:0")
    assert storage.nbytes() == storage.size() == len(storage) == 8
    assert storage.fill_(3).tolist() == [3] * 8
    assert storage[2] == 3
    assert "device=tpu:0" in repr(storage)


def test_a_storage_of_numbers():
    assert torch.UntypedStorage([1, 2, 3], device="tpu").tolist() == [1, 2, 3]
    assert torch.UntypedStorage([1, 2, 3]).tolist() == [1, 2, 3]
    assert torch.UntypedStorage(4, device="cpu").nbytes() == 4
    assert torch.UntypedStorage().nbytes() == 0


def test_slices_are_refused():
    with pytest.raises(NotImplementedError, match="Slice a tensor that uses it"):
        torch.UntypedStorage(8, device="tpu")[2:4]
    assert torch.UntypedStorage([1, 2, 3])[1:].tolist() == [2, 3]


def test_byteswap():
    x = torch.tensor([1, 256], dtype=torch.int16)
    on_device = x.to("tpu")
    for tensor in (x, on_device):
        tensor.untyped_storage().byteswap(torch.int16)
    assert x.tolist() == on_device.tolist() == [256, 1]


def test_an_empty_storage_of_the_same_device():
    assert torch.ones(2, device="tpu").untyped_storage().new().device.type == "tpu"
    assert torch.ones(2).untyped_storage().new().device.type == "cpu"
    assert torch.UntypedStorage._new_shared(4, device="tpu").nbytes() == 4


def test_data_pointers_are_unique_and_follow_the_offset():
    x, y = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
    assert x.data_ptr() not in (0, y.data_ptr())
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_copies():
    x = torch.arange(4, dtype=torch.int32).to("tpu")
    for copied in (x.untyped_storage().clone(), copy.copy(x.untyped_storage()), copy.deepcopy(x.untyped_storage())):
        assert copied.device.type == "tpu"
        assert copied.tolist() == torch.arange(4, dtype=torch.int32).untyped_storage().tolist()
        assert copied.data_ptr() != x.data_ptr()
    on_cpu = x.untyped_storage().cpu()
    assert on_cpu.device.type == "cpu"
    assert on_cpu.tolist() == x.untyped_storage().tolist()
    assert x.untyped_storage().to(device="cpu", non_blocking=True).tolist() == on_cpu.tolist()
    assert on_cpu.to(device="tpu").tolist() == on_cpu.tolist()
    x.untyped_storage().copy_(torch.zeros(4, dtype=torch.int32).untyped_storage())
    assert x.tolist() == [0] * 4


def test_typed_storage():
    x = torch.arange(4.0).to("tpu")
    assert x.storage().tolist() == [0, 1, 2, 3]
    assert x.untyped_storage().float().tolist()


def test_resize_frees_and_makes_anew():
    x = torch.arange(4.0).to("tpu")
    storage = x.untyped_storage()
    address = storage.data_ptr()
    assert storage.resize_(0) is storage
    assert storage.nbytes() == storage.size() == 0
    assert x.shape == (4,)
    storage.resize_(16)
    assert storage.nbytes() == 16
    assert storage.data_ptr() == address
    x.copy_(torch.ones(4))
    assert x.tolist() == [1] * 4


def test_resize_to_the_same_size_keeps_the_contents():
    x = torch.arange(4.0).to("tpu")
    x.untyped_storage().resize_(16)
    assert x.tolist() == [0, 1, 2, 3]


def test_resize_beyond_the_first_size_is_refused():
    with pytest.raises(RuntimeError, match="made with 8 bytes can't be resized to 9"):
        torch.ones(2, device="tpu").untyped_storage().resize_(9)


def test_a_freed_storage_holds_no_memory():
    x = torch.zeros(1024, device="tpu")
    x.cpu()
    before = torch.tpu.memory_allocated()
    x.untyped_storage().resize_(0)
    torch.tpu.synchronize()
    assert before - torch.tpu.memory_allocated() == 4096


def test_cpu_storages_resize_as_before():
    storage = torch.UntypedStorage(4)
    assert storage.resize_(100) is storage
    assert storage.nbytes() == len(storage) == 100


def test_set_and_data():
    x = torch.ones(3, device="tpu")
    parameter = torch.nn.Parameter(torch.randn(3).to("tpu"))
    parameter.data = x
    x.add_(1)
    assert parameter.tolist() == [2, 2, 2]
    parameter.data.mul_(2)
    assert x.tolist() == [4, 4, 4]
    y = torch.empty(0, device="tpu").set_(x)
    assert y.is_set_to(x)
    y.set_(x.untyped_storage(), 1, (2,), (1,))
    assert y.tolist() == [4, 4]
    y.set_(x.untyped_storage())
    assert y.shape == (3,)
    y.set_()
    assert y.shape == (0,)


def test_device_of_a_cpu_parameter_changes_in_place():
    parameter = torch.nn.Parameter(torch.randn(3))
    values = parameter.tolist()
    parameter.data = parameter.data.to("tpu")
    assert parameter.device.type == "tpu"
    assert parameter.tolist() == values


def test_pinned_memory():
    x = torch.arange(3.0)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned.data_ptr() != x.data_ptr()
    assert pinned.pin_memory().is_pinned()
    assert torch.equal(pinned.to("tpu", non_blocking=True).cpu(), x)
    assert x.pin_memory("tpu").is_pinned("tpu")
    assert x.untyped_storage().pin_memory().is_pinned()
    assert not torch.ones(2, device="tpu").is_pinned()
