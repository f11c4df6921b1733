"""`torch.accelerator`, `torch.tpu`'s queries, and memory statistics."""

from __future__ import annotations

import pytest
import torch


def test_the_device_is_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count() == 1
    assert torch.accelerator.current_device_index() == torch.tpu.current_device() == 0
    assert torch.get_device_module("tpu") is torch.get_device_module() is torch.tpu
    assert not torch.cuda.is_available()


def test_device_index():
    torch.accelerator.set_device_index(0)
    torch.accelerator.set_device_index(-1)
    torch.accelerator.set_device_index("tpu:0")
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0
    with torch.accelerator.device_index(None):
        pass
    with torch.tpu.device(0), torch.tpu.device("tpu"), torch.tpu.device_of(torch.ones(1)):
        assert torch.tpu.current_device() == 0
    with pytest.raises(ValueError, match="Expected a 'tpu' device"):
        torch.tpu.set_device("cpu")
    assert torch.tpu._utils._get_device_index("tpu:0") == 0
    assert torch.tpu._utils._get_device_index("cpu", allow_cpu=True) == -1


def test_capability():
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.bfloat16, torch.float32, torch.int64} <= dtypes
    assert torch.complex32 not in dtypes
    major, minor = torch.tpu.get_device_capability()
    assert major >= 4
    assert minor == 0
    assert torch.tpu.is_bf16_supported()


def test_properties():
    properties = torch.tpu.get_device_properties("tpu:0")
    assert properties.name == torch.tpu.get_device_name() == torch.tpu.get_device_name(0)
    assert properties.name.startswith("TPU v")
    assert properties.total_memory > 2**28
    assert properties.multi_processor_count == 1
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    assert torch.accelerator.get_memory_info()[1] == total == properties.total_memory


def test_state_queries():
    assert torch.tpu.is_initialized()
    assert torch.tpu._initialized
    torch.tpu._lazy_init()
    assert not torch.tpu._is_in_bad_fork()


def test_allocated_memory_follows_tensors():
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1 << 16).to("tpu")
    assert torch.tpu.memory_allocated() - before == 4 << 16
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_reserved() == torch.tpu.memory_allocated()
    del x
    assert torch.tpu.memory_allocated() == before


def test_peak_memory():
    torch.tpu.reset_peak_memory_stats()
    start = torch.tpu.max_memory_allocated()
    x = torch.ones(1 << 16).to("tpu")
    del x
    assert torch.tpu.max_memory_allocated() - start == 4 << 16
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.tpu.memory_allocated()


def test_memory_stats():
    x = torch.ones(1 << 16).to("tpu")
    for stats in (torch.tpu.memory_stats(), torch.accelerator.memory_stats()):
        for pool in ("active_bytes", "allocated_bytes", "reserved_bytes"):
            assert stats[f"{pool}.all.current"] == torch.tpu.memory_allocated()
            assert stats[f"{pool}.all.peak"] >= 4 << 16
        assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.tpu.memory_stats()["allocated_bytes.all.freed"] == 0
    torch.accelerator.empty_cache()
    torch.tpu.empty_cache()
    assert x.sum() == 1 << 16


def test_eager_mode():
    before = torch.tpu.eager_mode
    assert isinstance(before, torch.tpu.EagerMode)
    debug = torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    with torch.tpu.set_eager_mode(debug):
        assert torch.tpu.eager_mode is debug
        assert torch.ones(2, device="tpu").tolist() == [1, 1]
    assert torch.tpu.eager_mode is before
    torch.tpu.eager_mode = debug
    assert torch.tpu.eager_mode is debug
    torch.tpu.eager_mode = before


def test_every_public_name_is_there():
    for name in torch.tpu.__all__:
        assert hasattr(torch.tpu, name)
