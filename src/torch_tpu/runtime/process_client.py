"""The PJRT client of this process: one, made when first needed, on the platform that `TORCH_TPU_PLATFORM` names."""

from __future__ import annotations

import gc
import os
import sys
import threading

from torch_tpu.runtime import (
    compat,
    platform,
)
from torch_tpu.runtime.client import Client, client_errors


def _start(chosen: platform.Platform) -> Client:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Counting references to a value, and storing it for every thread to see, both need the interpreter's lock.
        raise RuntimeError(
            "the tpu device does not run on a free-threaded interpreter without the global lock: start Python with "
            "PYTHON_GIL=1 (or -X gil=1), or use an ordinary build of Python"
        )
    compat.check_methods()
    try:
        if chosen.topology is not None:
            from torch_tpu.runtime.topology import TopologyClient

            return TopologyClient(chosen)
        started = Client(chosen)
        gc.callbacks.append(compat.free_garbage)
        return started
    except client_errors() as error:
        said = str(error).splitlines()[0].rstrip(".")
        raise RuntimeError(
            f"the tpu device could not be started: the PJRT platform {chosen.name!r} ({chosen.reason}) said: {said}. "
            "`torch-tpu doctor` shows what was found; TORCH_TPU_PLATFORM=cpu runs on XLA:CPU instead."
        ) from error


_client: Client | None = None
_lock = threading.Lock()


def client() -> Client:
    """The client of this process, made at the first call on the platform that `TORCH_TPU_PLATFORM` names."""
    global _client
    if _client is None:
        with _lock:
            if _client is None:
                _client = _start(platform.choose(os.environ))
    return _client


def replace(made: Client) -> None:
    """Makes another client that of this process; buffers and programs of the old one are of no use to it."""
    global _client
    _client = made


def is_initialised() -> bool:
    """Whether the client exists; a process that forks after this point can't use the device in the child."""
    return _client is not None
