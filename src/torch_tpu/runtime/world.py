"""The PJRT client of one process in a world of processes, on XLA:CPU: its programs may communicate.

Programs without collectives are those of any client. One with collectives is compiled for the ranks it names, and only
they run it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_tpu import metrics
from torch_tpu.runtime import compat, fingerprint, malloc_settings, platform
from torch_tpu.runtime.client import Aval, Client, Executable, Options
from torch_tpu.runtime.world_service import FOREVER

# Seconds that ranks may take to connect.
_CONNECT = 120


def start_service(address: str, size: int) -> tuple[int, int]:
    """Starts the service of a world of so many ranks; gives the two ports at which they connect.

    It must not get the signals of this process's terminal, and lives on when this process ends.
    """
    script = Path(__file__).with_name("world_service.py")
    with subprocess.Popen(
        [sys.executable, "-P", str(script), compat.XLA_MODULE, address, str(size)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever reads this process's must not wait for that one's end
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if len(said) != 2:
            raise RuntimeError("XLA's service for several processes could not be started")
        # Not waited for: it ends after this process.
        process.returncode = 0
    return int(said[0]), int(said[1])


class Connection:
    """Of one rank to the service."""

    def __init__(self, address: str, ports: tuple[int, int], rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # While it is open the service lives.
        self._line = socket.create_connection((address, ports[1]), timeout=_CONNECT)
        self.store = compat.xla.get_distributed_runtime_client(
            f"{address}:{ports[0]}",
            rank,
            init_timeout=_CONNECT,
            heartbeat_timeout=FOREVER,
            shutdown_timeout=1,
            shutdown_on_destruction=False,
        )
        self.store.connect()
        # XLA's processes talk to each other at this address.
        self.own_address: str = self._line.getsockname()[0]


class WorldClient(Client):
    """Args:
    agree: asked before a program is compiled for ranks: raises where theirs differ.
    """

    is_of_world = True

    def __init__(self, connection: Connection, agree: Callable[[tuple[int, ...], str], None]) -> None:
        self._connection = connection
        self._agree = agree
        self._everyone: list[Any] = []
        super().__init__(platform.choose(os.environ))

    def _open(self, chosen: platform.Platform) -> Sequence[Any]:
        malloc_settings.keep_freed_memory()
        connection = self._connection
        made = compat.make_cpu_client(
            asynchronous=True,
            distributed_client=connection.store,
            node_id=connection.rank,
            num_nodes=connection.size,
            collectives=compat.xla.make_gloo_tcp_collectives(
                distributed_client=connection.store, hostname=connection.own_address
            ),
        )
        self._everyone = sorted(made.devices(), key=lambda device: device.process_index)
        devices: Sequence[Any] = made.local_devices()
        return devices

    def _executable(
        self, key: str, module: Any, options: Options, results: list[Aval], ranks: tuple[int, ...]
    ) -> Executable:
        if not ranks:
            return super()._executable(key, module, options, results, ranks)
        # Of the program alone: hosts may differ in what else the key depends on.
        self._agree(ranks, fingerprint.of_program("", module, ()))
        devices = tuple(self._everyone[rank] for rank in ranks)

        def compiled(compile_options: Any) -> Any:
            compile_options.num_replicas = len(devices)
            assignment = np.array([[device.id] for device in devices])
            compile_options.device_assignment = compat.DeviceAssignment.create(assignment)
            return self._client.compile_and_load(module, compat.xla.DeviceList(devices), compile_options)

        with metrics.timed("compile_seconds"):
            loaded = self._with_options(options, compiled)
        metrics.count("compile")
        handlers = [compat.result_handler(aval, self._sharding) for aval in results]
        return Executable(loaded, handlers, sum(aval.size * aval.dtype.itemsize for aval in results))
