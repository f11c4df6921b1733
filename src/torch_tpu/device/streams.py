"""Streams and events. Programs run in the order in which they were enqueued, so every stream names the same queue.

Waiting for another stream or for an event is therefore always already satisfied; what remains is to wait for the
device, and to know which stream is current, which is kept per thread as on CUDA.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch

from torch_tpu import hooks, metrics
from torch_tpu.device import fork
from torch_tpu.device.device_index import get_device_index

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
    "synchronize",
]

DEVICE_TYPE: int = torch._C._autograd.DeviceType.PrivateUse1.value
_CStream: Any = torch._C.Stream
_CEvent: Any = torch._C.Event

_stream_ids = itertools.count(1)


class _Current(threading.local):
    def __init__(self) -> None:
        self.stream: Stream | None = None
        # What `with stream:` blocks of this thread put back, innermost last.
        self.outer: list[Stream] = []


_current = _Current()


def synchronize(device: Any = None) -> None:
    """Waits until everything that was asked of the device has been computed."""
    get_device_index(device, optional=True)
    fork.check()
    # Asked of `sys.modules`: a process that never used the device has nothing to wait for, and stays without jaxlib.
    client = sys.modules.get("torch_tpu.runtime.process_client")
    if client is not None and client.is_initialised():
        with metrics.waiting("synchronize"):
            if hooks.flush is not None:
                hooks.flush("synchronize")
            if hooks.end_collectives is not None:
                hooks.end_collectives()
            try:
                client.client().synchronize()
            except client.client_errors() as error:
                from torch_tpu.tensor.errors import translate

                raise translate(error) from error


class Stream(_CStream):
    """A name for the device's one queue.

    Args:
        device: The device, `tpu`.
        priority: Accepted and without effect.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **identity: int) -> Stream:
        if not identity:
            index = get_device_index(device, optional=True)
            identity = {"stream_id": next(_stream_ids), "device_index": index, "device_type": DEVICE_TYPE}
        made: Stream = _CStream.__new__(cls, **identity)
        return made

    def __init__(self, device: Any = None, priority: int = 0, **identity: int) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority: there is one."""
        return 0, 0

    def query(self) -> bool:
        """Whether all work has been done. It has: asking waits for it."""
        synchronize()
        return True

    def synchronize(self) -> None:
        """Waits for the device."""
        synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one by default, and returns it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Does nothing: what comes later on the queue runs later."""

    def wait_stream(self, other: Any) -> None:
        """Does nothing: what comes later on the queue runs later."""

    def __enter__(self) -> Stream:
        _current.outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_stream(_current.outer.pop())


class Event(_CEvent):
    """A point in the device's queue.

    Args:
        enable_timing: Whether `elapsed_time` may be asked. Recording such an event waits for the device, so that
            the time between two of them is what the work between them took.
        blocking: Accepted and without effect.
        interprocess: Not supported.
    """

    def __new__(
        cls, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        get_device_index(device, optional=True)
        if interprocess:
            raise NotImplementedError("An event on 'tpu' can't be shared between processes")
        made: Event = _CEvent.__new__(cls, device="tpu", enable_timing=enable_timing)
        return made

    def __init__(
        self, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.enable_timing = enable_timing
        self._recorded = False
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Marks this point of the queue."""
        if self.enable_timing:
            synchronize()
            self._time = time.perf_counter()
        self._recorded = True

    def wait(self, stream: Any = None) -> None:
        """Does nothing: what comes later on the queue runs later."""

    def query(self) -> bool:
        """Whether the work before the event has been done. It has: asking waits for it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Waits for the work before the event."""
        # A timing event waited when it was recorded, and one that was never recorded has nothing before it.
        if self._recorded and not self.enable_timing:
            synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end_event._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        milliseconds: float = (end_event._time - self._time) * 1e3
        return milliseconds


_default: Stream = Stream(stream_id=0, device_index=0, device_type=DEVICE_TYPE)


def default_stream(device: Any = None) -> Stream:
    """The stream that is current where none was chosen."""
    get_device_index(device, optional=True)
    return _default


def current_stream(device: Any = None) -> Stream:
    """This thread's current stream."""
    get_device_index(device, optional=True)
    return _current.stream or _default


def set_stream(stream: Any) -> None:
    """Makes `stream` this thread's current stream."""
    if stream is not None:
        _current.stream = stream


class StreamContext:
    """Makes a stream the current one inside a `with` block; None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._outer = current_stream()
            set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            set_stream(self._outer)


def stream(stream: Any) -> StreamContext:
    """A `with` block in which `stream` is the current one."""
    return StreamContext(stream)
