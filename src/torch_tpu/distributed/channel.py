"""The collectives of one group, which gloo begins in the order of their calls.

A call returns before its inputs are computed; a thread waits for them. What is ready and small begins at once.
Sends and receives have a channel of their own: they need not wait until all ranks have come to an earlier collective.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque

from torch_tpu.distributed.agreement import Agreement
from torch_tpu.distributed.job import Job

# Bytes that are copied at once rather than in the other thread.
QUICK = 2**21
# Jobs that have begun and not ended.
MOST_IN_FLIGHT = 256

_channels: weakref.WeakSet[Channel]


class Channel:
    """Where the jobs of a group begin.

    Attributes:
        failure: why no more can begin; "" while they can.
        count: how many collectives have been called.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.failure = ""
        self.agreement = agreement
        # Held while jobs get their numbers and begin.
        self._lock = threading.RLock()
        self._waiting: deque[Job] = deque()
        self._came = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._begins = False
        self._in_flight: deque[Job] = deque()
        self._closed = False
        self.count = 0
        _channels.add(self)

    def number(self) -> int:
        """Of the next collective."""
        with self._lock:
            self.count += 1
            return self.count

    def since(self, count: int) -> list[Job]:
        """The collectives behind the first so many that have not ended."""
        return [job for job in list(self._in_flight) if job.number > count]

    def start(self, job: Job) -> None:
        """Begins a job, now or when it is its turn.

        Raises:
            RuntimeError: an earlier one failed, so that the ranks' calls no longer belong together.
        """
        while len(self._in_flight) >= MOST_IN_FLIGHT and not job.is_peer_to_peer:
            self._in_flight[0].wait(1.0)
            self._tidy()
        with self._lock:
            self._tidy()
            if self._closed:
                raise RuntimeError(f"{job.title}: the process group has been destroyed")
            if self.failure:
                raise RuntimeError(f"{self.failure}. No more collectives of this group can run.")
            job.on_slow = self.agreement.ask
            job.is_compared = self.agreement.asks(job)
            self._in_flight.append(job)
            if not self._waiting and not self._begins and not job.is_compared and job.is_quick(QUICK):
                job.issue()
                return
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=_begin_jobs, args=(weakref.ref(self),), daemon=True)
                self._thread.name = "torch_tpu collectives"
                self._thread.start()
            self._came.notify()

    def _tidy(self) -> None:
        """Lets go of jobs that have ended."""
        with self._lock:
            for _ in range(len(self._in_flight)):
                job = self._in_flight.popleft()
                if not job.poll():
                    self._in_flight.append(job)
                elif job.failure:
                    self._fail(job.failure)

    def begin_next(self) -> bool:
        """Begins the next job; False when there will be no more, or none came for a while."""
        with self._came:
            if not self._waiting:
                self._came.wait(10.0)
            if not self._waiting:
                if not self._closed:
                    self._thread = None  # the next job gets a new one
                return False
            job = self._waiting.popleft()
            self._begins = True
        try:
            if self.failure:
                job.fail(self.failure)
            else:
                why = self.agreement.ask(job) if job.is_compared else ""
                if why:
                    job.fail(why)
                else:
                    job.issue()
        except Exception as error:  # nobody else could say so
            job.fail(f"{type(error).__name__}: {error}")
        finally:
            if job.failure:
                self._fail(job.failure)
            with self._lock:
                self._begins = False
        return True

    def _fail(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            self.agreement.tell(why)

    def end_all(self, receives: bool = False) -> None:
        """Waits until what has begun has ended: not for receives, unless asked to.

        Raises:
            RuntimeError: one of them failed.
        """
        for job in list(self._in_flight):
            if receives or not job.is_receive:
                job.wait()
        self._tidy()
        if self.failure:
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """Ends what has begun; nothing can begin any more."""
        with contextlib.suppress(RuntimeError):
            self.end_all()
        self._close()

    def abort(self) -> None:
        """Fails what has begun; nothing can begin any more."""
        self._close()
        for job in list(self._in_flight):
            job.fail("the process group was aborted")

    def _close(self) -> None:
        self.agreement.close()
        with self._came:
            self._closed = True
            self._came.notify_all()


_channels = weakref.WeakSet()


def _begin_jobs(reference: weakref.ref[Channel]) -> None:
    while True:
        channel = reference()
        if channel is None or not channel.begin_next():
            return
        del channel


def end_all() -> None:
    """Waits for all collectives of this process that have begun.

    Raises:
        RuntimeError: one of them failed.
    """
    for channel in list(_channels):
        channel.end_all()
