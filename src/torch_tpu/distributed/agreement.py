"""Whether the ranks of a group call the same collective: they compare what they call through the group's store.

When a rank asks, it writes its call under the call's number and waits until every other rank has done so. Each rank
asks where it calls what has not followed the same few calls before, so all of them do, and in a loop nobody does from
its third round on. Who leaves the loop asks, before gloo has begun what other ranks don't call, which might end the
process. A rank that waits long for a collective asks too: so it meets the one that left.
`TORCH_TPU_CHECK_COLLECTIVES` may ask more often, or less.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torch_tpu.distributed.job import SLOW, Job
from torch_tpu.distributed.lifelines import Lifelines
from torch_tpu.metrics import user_lines

VARIABLE = "TORCH_TPU_CHECK_COLLECTIVES"
# A call is known if it has followed so many others before.
CONTEXT = 4
# Such sequences that are remembered; all ranks forget them at the same call.
MOST_KNOWN = 4096
# Seconds between two looks at the store.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _LONG_PAUSE = 1e-4, 0.02, 0.2
PAGE = "docs/user/when-ranks-disagree.md"
_SEPARATOR = "\n"
_NOTHING = "-"


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
    """Compares the calls of one group's ranks.

    Args:
        timeout: how long other ranks may take to come.
    """

    def __init__(self, store: Any, rank: int, ranks: list[int], timeout: datetime.timedelta, gloo: Any) -> None:
        self.timeout = timeout
        self._lifelines = Lifelines(gloo)
        self._given_store = store
        self._rank = rank
        self._ranks = ranks
        self._frequency = frequency()
        self._latest: deque[str] = deque(maxlen=CONTEXT)
        self._known: set[tuple[str, ...]] = set()
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
        sequence = (*self._latest, job.title)
        self._latest.append(job.title)
        if sequence in self._known:
            return False
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(sequence)
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
            self._asked.discard(job.number - MOST_KNOWN)

    def _compare(self, job: Job) -> str:
        place = user_lines.where(job.place)
        key = self._key(job.number, self._rank)
        self._store.set(key, _SEPARATOR.join((job.title, place)))
        keys = {n: self._key(job.number, n) for n in range(len(self._ranks)) if n != self._rank}
        absent = self._wait(keys, lambda: self._closed or job.is_computed)
        if absent:
            return f"{absent} collective {job.number} of this group; {self._calls(job.title)} ({PAGE})"
        for n, theirs in keys.items():
            title, _, line = self._read(theirs).partition(_SEPARATOR)
            if title not in (job.title, _NOTHING):
                return (
                    f"the ranks differ at collective {job.number} of this group: {self._calls(job.title)} at {place}, "
                    f"rank {self._ranks[n]} calls {title} at {line}. Every rank of a group must call the same "
                    f"collectives in the same order ({PAGE})"
                )
        if job.is_computed:  # somebody may have asked who is not waited for
            return ""
        if self._previous is not None:
            self._store.delete_key(self._previous)  # every rank is past it
        self._previous = key
        return ""

    def compare_programs(self, ranks: Sequence[int], number: int, title: str) -> str:
        """Says how the programs differ that these ranks compile now; "" where they are the same.

        Args:
            number: how many programs these ranks have compiled together, this one included.
        """
        place = user_lines.where(user_lines.here_or_backward())
        prefix = f"program/{'_'.join(map(str, ranks))}/{number}/"
        own = self._ranks[self._rank]
        self._store.set(f"{prefix}{own}", _SEPARATOR.join((title, place)))
        keys = {self._ranks.index(rank): f"{prefix}{rank}" for rank in ranks if rank != own}
        absent = self._wait(keys, lambda: self._closed)
        if absent:
            return (
                f"{absent} program {number} of the ranks {list(ranks)}, which rank {own} compiles at {place} ({PAGE})"
            )
        for n, theirs in keys.items():
            other, _, line = self._read(theirs).partition(_SEPARATOR)
            if other not in (title, _NOTHING):
                return (
                    f"the ranks differ: rank {own} compiles a program that communicates at {place}, rank "
                    f"{self._ranks[n]} another one at {line}. Every rank must compile the same graphs in order ({PAGE})"
                )
        return ""

    def tell(self, why: str) -> None:
        """Tells ranks that wait for this one why it calls nothing any more."""
        if len(self._ranks) > 1 and self._frequency != "off":
            with contextlib.suppress(dist.DistError):
                self._store.set(f"failure/{self._rank}", why)

    def _read(self, key: str) -> str:
        """What another rank has written; `_NOTHING` where it has not, or has taken it away again.

        The store's `get` would wait for it.
        """
        found: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return found.decode()

    def _wait(self, keys: Mapping[int, str], is_over: Callable[[], bool]) -> str:
        """Waits for what other ranks write, as long as it is not over; says who does not come."""
        began = time.monotonic()
        pause = _SHORTEST_PAUSE
        while not self._store.check(list(keys.values())) and not is_over():
            waited = time.monotonic() - began
            if waited > SLOW:
                for n in (n for n, key in keys.items() if not self._store.check([key])):
                    end, failure = self._lifelines.end_of(n), self._read(f"failure/{n}")
                    if failure != _NOTHING:
                        return f"rank {self._ranks[n]} has failed ({failure}) before"
                    if end:
                        return f"rank {self._ranks[n]} has ended ({end}) before"
                    if waited > self.timeout.total_seconds():
                        return f"rank {self._ranks[n]} did not come within {self.timeout.total_seconds():g} s to"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE if waited < SLOW else _LONG_PAUSE)
        return ""

    def _calls(self, title: str) -> str:
        return f"rank {self._ranks[self._rank]} calls {title}"

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"

    def close(self) -> None:
        """Ends waiting."""
        self._closed = True
