"""Whether the ranks of a group call the same collective: they compare what they call through the group's store.

When a rank asks, it writes its call under the call's number and waits until every other rank has done so. Each rank
asks at its first call of a kind, so all of them do. A rank that waits long for a collective asks too: so ranks that
differ later find each other. `TORCH_TPU_CHECK_COLLECTIVES` may ask more often, or less.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torch_tpu.distributed.job import Job
from torch_tpu.metrics import user_lines

VARIABLE = "TORCH_TPU_CHECK_COLLECTIVES"
# Kinds of calls that are remembered; all ranks forget them at the same call.
MOST_KINDS = 4096
# Seconds between two looks at the store.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-4, 0.02
_SEPARATOR = "\n"


def frequency() -> int | str:
    """What the variable says: "first", "off", or a number n for every n-th call (always: 1)."""
    said = os.environ.get(VARIABLE, "").strip().lower() or "first"
    if said in ("first", "off"):
        return said
    if said == "always":
        return 1
    if said.isdigit() and int(said):
        return int(said)
    raise ValueError(f"{VARIABLE}={said!r}: it may be first, always, off, or a number n for every n-th collective")


class Agreement:
    """Of one group.

    Args:
        timeout: how long other ranks may take to come.
    """

    def __init__(self, store: Any, rank: int, ranks: list[int], timeout: datetime.timedelta) -> None:
        self.timeout = timeout
        self._given_store = store
        self._rank = rank
        self._ranks = ranks
        self._frequency = frequency()
        self._kinds: set[str] = set()
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._previous: str | None = None
        self._closed = False

    @functools.cached_property
    def _store(self) -> Any:
        # A connection of its own: on a shared one this thread would wait while another one waits for a key.
        return self._given_store.clone()

    def asks(self, job: Job) -> bool:
        """Whether this call is one to compare."""
        if len(self._ranks) == 1 or self._frequency == "off" or job.is_peer_to_peer:
            return False
        if isinstance(self._frequency, int) and job.number % self._frequency == 0:
            return True
        if job.title in self._kinds:
            return False
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds.add(job.title)
        return True

    def ask(self, job: Job) -> str:
        """Compares this call with those of the other ranks, once; says how they differ, "" where they don't."""
        if len(self._ranks) == 1 or self._frequency == "off" or job.is_peer_to_peer:
            return ""
        with self._lock:
            if job.number in self._asked:
                return ""
            self._asked.add(job.number)
        try:
            return self._compare(job)
        except dist.DistError as error:
            return f"the other ranks could not be asked what they call: {str(error).splitlines()[0]}"
        finally:
            self._asked.discard(job.number - MOST_KINDS)

    def _compare(self, job: Job) -> str:
        own = _SEPARATOR.join((job.title, user_lines.where(job.place)))
        key = self._key(job.number, self._rank)
        self._store.set(key, own)
        others = [n for n in range(len(self._ranks)) if n != self._rank]
        deadline = time.monotonic() + self.timeout.total_seconds()
        if not self._wait([self._key(job.number, n) for n in others], deadline, job):
            absent = [n for n in others if not self._store.check([self._key(job.number, n)])]
            return "" if not absent or job.is_done or self._closed else self._absent(job, absent[0])
        for n in others:
            title, _, line = self._store.get(self._key(job.number, n)).decode().partition(_SEPARATOR)
            if title != job.title:
                return (
                    f"the ranks differ at collective {job.number} of this group: rank {self._ranks[self._rank]} calls "
                    f"{job.title} at {user_lines.where(job.place)}, rank {self._ranks[n]} calls {title} at {line}. "
                    "Every rank of a group must call the same collectives in the same order "
                    "(docs/user/when-ranks-disagree.md)"
                )
        if self._previous is not None:
            self._store.delete_key(self._previous)  # every rank is past it
        self._previous = key
        return ""

    def compare_programs(self, ranks: Sequence[int], number: int, title: str) -> str:
        """Whether these ranks compile the same program, the so-manyth of theirs together; says how they differ."""
        place = user_lines.where(user_lines.here_or_backward())
        prefix = f"program/{'_'.join(map(str, ranks))}/{number}/"
        self._store.set(f"{prefix}{self._ranks[self._rank]}", _SEPARATOR.join((title, place)))
        deadline = time.monotonic() + self.timeout.total_seconds()
        pause = _SHORTEST_PAUSE
        while not self._store.check([f"{prefix}{rank}" for rank in ranks]):
            if time.monotonic() > deadline:
                absent = [r for r in ranks if not self._store.check([f"{prefix}{r}"])]
                return f"rank {absent} did not come to program {number} of the ranks {list(ranks)}, called at {place}"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        for rank in ranks:
            other, _, line = self._store.get(f"{prefix}{rank}").decode().partition(_SEPARATOR)
            if other != title:
                return (
                    f"ranks differ: rank {self._ranks[self._rank]} compiles a program that communicates at {place}, "
                    f"rank {rank} another one at {line}. Every rank must compile the same graphs in the same order "
                    "(docs/user/when-ranks-disagree.md)"
                )
        return ""

    def _wait(self, keys: list[str], deadline: float, job: Job) -> bool:
        """Waits for other ranks' calls; False if they do not come, or the job has ended without them."""
        pause = _SHORTEST_PAUSE
        while not self._store.check(keys):
            if time.monotonic() > deadline or job.is_done or self._closed:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _absent(self, job: Job, n: int) -> str:
        return (
            f"rank {self._ranks[n]} did not come to collective {job.number} of this group within "
            f"{self.timeout.total_seconds():g} s; rank {self._ranks[self._rank]} calls {job.title} there "
            "(docs/user/when-ranks-disagree.md)"
        )

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"

    def close(self) -> None:
        """Ends waiting."""
        self._closed = True
