"""Streams and events."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
import torch

from torch_tpu.runtime import client


def test_streams_of_the_device():
    stream = torch.tpu.Stream()
    assert isinstance(stream, torch.Stream)
    assert stream.device == torch.device("tpu:0")
    assert stream != torch.tpu.Stream()
    assert torch.tpu.Stream(device="tpu:0", priority=-1).priority == -1
    assert isinstance(torch.Stream(device="tpu"), torch.tpu.Stream)
    assert isinstance(torch.Stream(), torch.tpu.Stream)
    same = torch.Stream(stream_id=stream.stream_id, device_index=0, device_type=stream.device_type)
    assert same == stream
    assert isinstance(same, torch.tpu.Stream)
    stream.wait_stream(same)
    stream.synchronize()
    assert stream.query()


def test_streams_of_other_devices_are_pytorchs():
    stream = torch.Stream(device="cpu")
    assert type(stream) is torch._C.Stream
    assert isinstance(stream, torch.Stream)


def test_the_current_stream():
    default = torch.tpu.default_stream()
    assert torch.tpu.current_stream() == default
    stream, other = torch.tpu.Stream(), torch.tpu.Stream()
    with torch.tpu.stream(stream):
        assert torch.tpu.current_stream() is stream
        assert torch.accelerator.current_stream() is stream
        with other:
            assert torch.tpu.current_stream() is other
            with other, stream:
                assert torch.tpu.current_stream() is stream
            assert torch.tpu.current_stream() is other
        assert torch.tpu.current_stream() is stream
        with torch.tpu.stream(None):
            assert torch.tpu.current_stream() is stream
    assert torch.tpu.current_stream() == default
    torch.tpu.set_stream(stream)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_stream()))
    thread.start()
    thread.join()
    assert seen == [default]
    torch.accelerator.set_stream(default)
    assert torch.tpu.current_stream() == default


def test_events():
    for event in (torch.tpu.Event(), torch.Event(device="tpu"), torch.Event()):
        assert isinstance(event, torch.tpu.Event)
        assert isinstance(event, torch.Event)
        assert event.query()
        event.record()
        event.record(torch.tpu.current_stream())
        event.wait()
        event.synchronize()
        assert event.query()
        torch.tpu.current_stream().wait_event(event)
    assert isinstance(torch.tpu.Stream().record_event(), torch.tpu.Event)


def test_elapsed_time_includes_the_work_between():
    start, end = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed_time(end) < 2000
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.tpu.Event())


def test_record_stream():
    x = torch.ones(2, device="tpu")
    x.record_stream(torch.tpu.Stream())
    assert x.tolist() == [1, 1]


def test_synchronize_waits_for_results_that_nobody_holds(monkeypatch: pytest.MonkeyPatch):
    """As a loop that measures time drops them: each run has a token, and all are waited for."""
    waited = []

    class Token:
        def block_until_ready(self) -> None:
            waited.append(self)

    x = torch.randn(4, 4, device="tpu")
    monkeypatch.setattr(client, "_runs", deque())
    for _ in range(3):
        x @ x
    assert len(client._runs) == 3
    tokens = [Token() for _ in range(3)]
    client._runs.extend(tokens)
    torch.tpu.synchronize()
    assert waited == tokens
    assert not client._runs


def test_no_more_than_a_bounded_number_of_runs_is_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "MOST_RUNS", 5)
    x = torch.zeros(3, device="tpu")
    for _ in range(20):
        x = x + 1
    assert x.tolist() == [20.0] * 3
    assert len(client._runs) <= 5


def test_synchronize_waits():
    x = torch.ones(64, 64, device="tpu")
    for _ in range(4):
        x = x @ x / 64
    torch.tpu.synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(x.cpu(), torch.ones(64, 64))
