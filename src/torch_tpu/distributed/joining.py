"""Replaces this process's client by one of the world, for programs that communicate.

A thread prepares it when the first group is made; it is used from the first such program on.

What the old client holds moves without being copied: the new one's buffers lie over the same memory. Its programs are
compiled anew, or found in the disk cache.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch.distributed as dist

from torch_tpu import hooks
from torch_tpu.distributed import channel
from torch_tpu.distributed.agreement import Agreement
from torch_tpu.eager.deferred import thread_graphs
from torch_tpu.eager.program import argument_buffers
from torch_tpu.eager.program.plan import Plan
from torch_tpu.runtime import platform, process_client, world
from torch_tpu.runtime.client import Client
from torch_tpu.tensor.storage import DONATED, Value

VARIABLE = "TORCH_TPU_COLLECTIVES"
ENGINES = ("", "gloo", "xla")


def engine() -> str:
    """What the variable says: "gloo" or "xla" for all collectives; "" for gloo where called eagerly, XLA in graphs."""
    said = os.environ.get(VARIABLE, "").strip().lower()
    if said not in ENGINES:
        raise ValueError(f"{VARIABLE}={said!r}: it may be gloo or xla, or unset")
    return said


class Joining:
    """Connects this process with a world, in a thread: all ranks do so when they make their first group.

    Args:
        store: of the group of all ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, agreement: Agreement) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._agreement = agreement
        self._calls: dict[tuple[int, ...], int] = {}
        self._client: Client | None = None
        self._failure = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._prepare, name="torch_tpu world", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        try:
            store = self._store.clone()  # this thread waits at a connection of its own
            if self._rank == 0:
                address = _address_of_first_rank()
                ports = world.start_service(address, self._size)
                store.set("service", f"{address} {ports[0]} {ports[1]}")
            address, *said = store.get("service").decode().split()
            connection = world.Connection(address, (int(said[0]), int(said[1])), self._rank, self._size)
            self._client = world.WorldClient(connection, self._agree)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    def join(self) -> Client:
        """The client of the world, which is this process's from now on."""
        self._thread.join()
        with self._lock:
            if self._client is None:
                raise RuntimeError(
                    "this process could not join the others for programs that communicate: "
                    f"{self._failure}. {VARIABLE}=gloo does without them."
                )
            if process_client.is_initialised() and process_client.client() is not self._client:
                thread_graphs.flush_all("process group")
                channel.end_all()
                _move(self._client)
            process_client.replace(self._client)
            return self._client

    def _agree(self, ranks: tuple[int, ...], title: str) -> None:
        """Raises RuntimeError where other ranks compile another program now."""
        number = self._calls[ranks] = self._calls.get(ranks, 0) + 1
        why = self._agreement.compare_programs(ranks, number, title)
        if why:
            raise RuntimeError(why)


def _address_of_first_rank() -> str:
    """Where other ranks find this process: where they found the store, if they were told."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def _move(made: Client) -> None:
    """Gives what the process's client holds to another one."""
    old = process_client.client()
    hooks.forget_programs()
    argument_buffers.clear()
    for found in _everything():
        kind = type(found)
        if kind is Value and found.array is not None and found.array is not DONATED:
            found.array = made.adopt(old.get(found.array))
        elif kind is Plan:
            found.executable = None


def _everything() -> list[Any]:
    """All objects of the process that refer to others."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()


def prepare(store: Any, rank: int, size: int, agreement: Agreement) -> None:
    """Begins to join the world of the first group, if this process runs on XLA:CPU and may use XLA's collectives."""
    chosen = platform.choose(os.environ)
    if engine() != "gloo" and size > 1 and chosen.name == "cpu" and chosen.plugin_path is None:
        if process_client.is_initialised():
            process_client.client().is_of_world = False  # another world's has ended; programs of this one join this one
        hooks.join_world = Joining(dist.PrefixStore("world/", store), rank, size, agreement).join
