"""Processes with one device each that run functions of the tests together; they end with the test, whatever happens."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

# Seconds that one function may take; a process that takes longer is killed, with its stacks on stderr.
LIMIT = 240.0


class RankError(AssertionError):
    """Functions that failed, with the traceback of each rank."""


class World:
    """Ranks 0 to n-1, each a process of its own.

    Args:
        backend: of the process group; None for what `init_process_group` chooses, "" for no group.
        timeout: of the group, in seconds.
        environment: variables of the processes.
    """

    def __init__(
        self,
        size: int,
        backend: str | None = "tpu_dist",
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = size, backend, timeout, environment
        self._is_fresh = True
        # As torchrun does: the store is the parent's, so no port is chosen twice, and rank 0 may die.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            own, theirs = context.Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            }
            process = context.Process(target=_serve, args=(theirs, variables, backend, timeout), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(own)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Calls a function of a module in every process; what it returns, by rank.

        Raises:
            RankError: it failed somewhere. The next call gets new processes: these may wait for each other.
        """
        if not self._is_fresh:
            self.__init__(*self._arguments)  # type: ignore[misc]
        outcomes = self.outcomes(function, *args, limit=limit)
        failed = [f"rank {rank}: {said}" for rank, (is_ok, said) in enumerate(outcomes) if not is_ok]
        if failed:
            self.close(0.0)
            raise RankError("\n".join(failed))
        return [said for _, said in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[tuple[bool, Any]]:
        """Whether the function returned, and what it returned; else the traceback or the exit code as text."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((function, args))
        deadline = time.monotonic() + limit
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < len(self._pipes):
            left = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(left), max(deadline - time.monotonic(), 0))
            for pipe in ready:
                rank = left[pipe]  # type: ignore[index]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self.processes[rank].join(10)
                    found[rank] = (False, f"ended with exit code {self.processes[rank].exitcode}")
            if not ready:
                for rank in left.values():
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)  # shows its stacks
                    found[rank] = (False, f"has not ended after {limit:g} s")
                time.sleep(1)
                self.close()
        return [found[rank] for rank in range(len(self._pipes))]

    def renew(self) -> None:
        """Gives the next call new processes: these have a group of no use."""
        self.close(0.0)

    def store_keys(self, part: str) -> list[str]:
        """The keys in the store of the processes' groups with this in them."""
        return [key for key in self._store.list_keys() if part in key]

    def close(self, seconds: float = 20.0) -> None:
        """Ends the processes; those that have not ended by themselves after so long are killed."""
        self._is_fresh = False
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def world(size: int, *args: Any, **options: Any) -> Iterator[World]:
    made = World(size, *args, **options)
    try:
        yield made
    finally:
        made.close()


def _serve(pipe: Connection, variables: Mapping[str, str], backend: str | None, timeout: float) -> None:
    """The loop of a process."""
    os.environ.update(variables)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    import torch

    torch.set_num_threads(1)
    import torch_tpu  # noqa: F401  (registers the device where the package is not installed)

    if backend != "":
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone
        if task is None:
            break
        function, args = task
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # pytest's own are no Exceptions
            pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # taking everything apart takes seconds; test_groups.py has processes that end by themselves
