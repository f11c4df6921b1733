"""Threads that wait for sends and receives: gloo can be asked about those in no other way, and must be asked once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
_lock = threading.Lock()
_idle = 0


def run(task: Callable[[], None]) -> None:
    """Runs a function, which raises nothing, in another thread. As many run at once as there are."""
    global _idle
    with _lock:
        is_new = _idle == 0
        if not is_new:
            _idle -= 1
    if is_new:
        threading.Thread(target=_loop, args=(task,), name="torch_tpu send/recv", daemon=True).start()
    else:
        _tasks.put(task)


def _loop(task: Callable[[], None]) -> None:
    global _idle
    while True:
        task()
        del task  # with what it refers to
        with _lock:
            _idle += 1
        task = _tasks.get()
