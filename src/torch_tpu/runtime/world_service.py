"""XLA's service for a world of processes, in a process of its own: a rank that ends takes nobody else with it.

Run as a script with the name of jaxlib's private module, the address to listen at and the number of ranks. It prints
the ports of the service and of a second one, to which every rank stays connected. It ends when the last of them has
gone, however that ended; so it outlives rank 0, which starts it, and nobody has to end it.
"""

from __future__ import annotations

import importlib
import select
import socket
import sys

# Seconds without a word from a rank after which XLA ends the others. Who has gone is found out elsewhere.
FOREVER = 10**8
# Seconds until the first rank has to be connected.
_FIRST = 600


def _free_port(address: str) -> int:
    with socket.socket() as s:
        s.bind((address, 0))
        port: int = s.getsockname()[1]
        return port


def main(module: str, address: str, size: int) -> None:
    xla = importlib.import_module(module)
    port = _free_port(address)
    service = xla.get_distributed_runtime_service(
        f"{address}:{port}", size, heartbeat_timeout=FOREVER, shutdown_timeout=1
    )
    listening = socket.create_server((address, 0), backlog=size)
    print(port, listening.getsockname()[1], flush=True)
    sys.stdout.close()
    connected: list[socket.socket] = []
    came = 0
    while came < size or connected:
        ready, _, _ = select.select([listening, *connected], [], [], None if connected else _FIRST)
        if not ready:
            break
        for s in ready:
            if s is listening:
                connected.append(listening.accept()[0])
                came += 1
            elif not s.recv(1024):
                connected.remove(s)
                s.close()
        if came and not connected:
            break
    del service


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
