"""The handle of a collective: what `async_op=True` returns, and DDP asks for a future."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_tpu.distributed.job import Job
from torch_tpu.eager import mode


class Work(dist.Work):
    """Waiting is ordering: who reads a result waits for it, so `wait` returns at once, as on other accelerators.

    With a timeout it waits for the end; so it does for a barrier, and in the mode DEFER_NEVER_AND_LAUNCH_BLOCKING.
    """

    def __init__(self, jobs: Sequence[Job], tensors: Any, blocks: bool = False) -> None:
        super().__init__()
        self._jobs = jobs
        self._tensors = tensors
        self._blocks = blocks

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if self._blocks or mode.blocking or seconds > 0:
            for job in self._jobs:
                if not job.wait(seconds if seconds > 0 else float("inf")):
                    raise RuntimeError(f"{job.title} has not ended after {seconds:g} s")
        for job in self._jobs:
            job.check()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(job.poll() for job in self._jobs)

    def is_success(self) -> bool:
        return self.is_completed() and not any(job.failure for job in self._jobs)

    def exception(self) -> Any:
        failure = next((job.failure for job in self._jobs if job.failure), "")
        return RuntimeError(failure) if failure else None

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the tensors, which may still be on their way: reading them waits."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def source_rank(self) -> int:
        """The rank in the group that a tensor was received from; waits for it."""
        for job in self._jobs:
            job.flush("read")
        return self._jobs[0].source

    _source_rank = source_rank
