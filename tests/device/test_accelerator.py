"""`torch.accelerator`, `torch.tpu`'s queries, and memory statistics."""

from __future__ import annotations

import re

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


def test_every_function_of_the_accelerator_answers(run_python):
    """None ends the process: functions that C++ implements for its own devices read what is not there."""
    printed = run_python("""
import torch
x = torch.ones(1, device="tpu")
a = torch.accelerator
a.empty_host_cache()
a.memory.empty_host_cache()
a.empty_cache()
a.synchronize()
a.set_stream(a.current_stream())
a.reset_peak_memory_stats()
a.reset_accumulated_memory_stats()
print(a.memory_allocated(), a.max_memory_allocated(), a.memory_reserved(), a.max_memory_reserved())
c = torch._C
print(c._accelerator_getDeviceIndex(), c._accelerator_hooks_device_count(), c._accelerator_hooks_get_current_device())
print(c._accelerator_hooks_exchange_device(0), c._accelerator_hooks_maybe_exchange_device(-1))
c._accelerator_hooks_set_current_device(0)
for refused in (lambda: a.Graph(), lambda: a.memory._snapshot(), lambda: c._accelerator_hooks_set_current_device(3)):
    try:
        refused()
    except RuntimeError as error:
        print(type(error).__name__, error)
""")
    lines = printed.splitlines()
    assert lines[0] == "4 4 4 4"
    assert lines[1:3] == ["0 1 0", "0 0"]
    assert "Graph is not supported" in lines[3]
    assert lines[4].startswith("NotImplementedError torch.tpu.memory._snapshot: no history")
    assert "invalid device tpu:3" in lines[5]


def test_memory_summary_has_the_counts():
    held = torch.ones(3, 1 << 20).to("tpu")
    text = torch.tpu.memory_summary()
    figures = dict(re.findall(r"^  (\S.*?) +([\d,.]+)(?: MiB)?$", text, re.MULTILINE))
    assert float(figures["Allocated now"]) == round(torch.tpu.memory_allocated() / 2**20, 1)
    assert float(figures["Peak"].replace(",", "")) == round(torch.tpu.max_memory_allocated() / 2**20, 1)
    assert int(figures["Allocations"].replace(",", "")) == torch.tpu.memory_stats()["num_device_alloc"]
    assert "float32[3, 1048576] = 12.0 MiB" in text
    assert "float32[3, 1048576]" not in torch.tpu.memory_summary("tpu:0", abbreviated=True)
    assert torch.tpu.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= held.nbytes
    assert torch.tpu.memory.get_allocator_backend() == "pjrt"
    assert torch.tpu.memory.host_memory_stats() == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_record_memory_history", ()),
        ("_record_memory_history", ("state",)),
        ("_snapshot", ()),
        ("_dump_snapshot", ("file.pickle",)),
        ("memory_snapshot", ()),
        ("set_per_process_memory_fraction", (0.5,)),
        ("caching_allocator_alloc", (64,)),
        ("caching_allocator_delete", (0,)),
        ("change_current_allocator", (None,)),
        ("MemPool", ()),
        ("use_mem_pool", (None,)),
    ],
)
def test_what_needs_an_allocator_of_pytorch_is_refused_in_words(name, arguments):
    with pytest.raises(NotImplementedError, match=rf"^torch\.tpu\.memory\.{name}: .*(memory|tensor)"):
        getattr(torch.tpu.memory, name)(*arguments)


def test_recording_memory_can_be_switched_off():
    assert torch.tpu.memory._record_memory_history(enabled=None) is None
    assert torch.tpu.memory._record_memory_history(None) is None
