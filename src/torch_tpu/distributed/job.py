"""A collective on its way: what it reads, the work that gloo does, and the values that its results become."""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.distributed import values, waiters
from torch_tpu.distributed.values import Arriving
from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.tensor.storage import Content, value_of

# So long C++ may wait at a time: Python then looks for Ctrl-C.
_SLICE = datetime.timedelta(seconds=0.25)
# After so many seconds of waiting somebody asks why.
SLOW = 2.0

# Reads host tensors (inputs), which nobody may write to, and writes others (outputs): what gloo is doing then, and what
# is left to do when it is done.
Begun = tuple[list[Any], Callable[[], None] | None]
Run = Callable[[list[torch.Tensor], list[torch.Tensor]], Begun]
Spec = tuple[Sequence[int], torch.dtype]


class Operand:
    """A device tensor as it was when a collective was called: later writes to it don't count.

    Its memory is given to no program meanwhile, because this refers to the value.
    """

    __slots__ = ("place", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        self.place = values.place_of(tensor)
        self.value: Content = value_of(tensor.untyped_storage())
        if self.value.graph is not None and not values.is_late(self.value):
            self.value.array  # noqa: B018  (what this thread has recorded is run by this thread)


class Job:
    """One collective, send or receive.

    Attributes:
        title: what it is, in the user's words: `all_reduce(float32[4], sum)`. Equal on all ranks of a collective.
        place: where the user's program called it.
        number: which collective of its group it is; -1 for sends and receives, which are not counted.
        failure: why it failed; "" otherwise.
        is_done: it has ended, well or not.
        source: of a receive that has ended: the rank it came from.
        is_compared: the ranks compare their calls before it begins.
        on_slow: called once when somebody has waited for a while; may say why it fails.
    """

    def __init__(self, title: str, run: Run, inputs: Sequence[torch.Tensor], number: int, place: CallSite) -> None:
        self.title = title
        self.place = place
        self.number = number
        self.failure = ""
        self.is_done = False
        self.source = -1
        self.is_compared = False
        self.on_slow: Callable[[Job], str] | None = None
        self._run: Run = run
        self._inputs = [Operand(t) for t in inputs]
        self._results: list[tuple[weakref.ref[Arriving], Spec]] = []
        self._hosts: list[torch.Tensor] = []
        self._works: list[Any] = []
        self._after: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._issued = threading.Event()
        self._ended = threading.Event()

    @property
    def is_peer_to_peer(self) -> bool:
        return self.number < 0

    @property
    def is_receive(self) -> bool:
        return self.is_peer_to_peer and bool(self._results)

    @property
    def is_computed(self) -> bool:
        """Whether gloo is done with it, though its results may not have been made."""
        works = self._works
        return self.is_done or (bool(works) and all(work.is_completed() for work in works))

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new device tensor for the next result."""
        tensor, value = values.contiguous_result(self, shape, dtype)
        self._results.append((weakref.ref(value), (tuple(shape), dtype)))
        return tensor

    def is_quick(self, most: int) -> bool:
        """Whether issuing it takes no time: it waits for nothing, and copies few bytes."""
        return all(values.is_there(o.value) for o in self._inputs) and sum(o.value.nbytes for o in self._inputs) <= most

    def issue(self) -> None:
        """Lets gloo begin, after waiting for the inputs."""
        try:
            hosts = [values.host_elements(o.value, o.place) for o in self._inputs]
            self._hosts = [torch.empty(shape, dtype=dtype, device="cpu") for _, (shape, dtype) in self._results]
            self._works, self._after = self._run(hosts, self._hosts)
        except Exception as error:
            self.fail(str(error))
        finally:
            self._issued.set()
        if self.is_peer_to_peer and not self.is_done:
            waiters.run(self._end_peer_to_peer)

    def fail(self, why: str) -> None:
        """Ends it with an error, unless it has ended."""
        if not self.is_done:
            self.failure = f"{self.title}, called at {user_lines.where(self.place)}, failed: {why}"
            self._close()
        self._issued.set()

    # --- the end -----------------------------------------------------------------------------------------------------

    def flush(self, cause: str) -> None:
        """Waits until it has ended.

        Raises:
            RuntimeError: it failed.
        """
        if not self.is_done:
            with metrics.waiting("collective"):
                self.wait()
        self.check()

    def check(self) -> None:
        """Raises what it failed with."""
        if self.failure:
            raise RuntimeError(self.failure)

    def wait(self, seconds: float = float("inf")) -> bool:
        """Waits until it has ended, or so long; whether it has."""
        deadline = time.monotonic() + seconds
        if self.is_peer_to_peer:
            self._ended.wait(None if seconds == float("inf") else seconds)
        elif self._issued.wait(None if seconds == float("inf") else seconds) and self._lock.acquire(
            timeout=min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
        ):
            try:
                self._wait_for_works(deadline)
            finally:
                self._lock.release()
        return self.is_done

    def poll(self) -> bool:
        """Whether it has ended; doesn't wait."""
        if (
            not self.is_done
            and not self.is_peer_to_peer
            and self._issued.is_set()
            and self._lock.acquire(blocking=False)
        ):
            try:
                if not self.is_done and all(w.is_completed() for w in self._works):
                    self._wait_for_works(float("inf"))
            finally:
                self._lock.release()
        return self.is_done

    def _wait_for_works(self, deadline: float) -> None:
        slow = time.monotonic() + SLOW
        try:
            while not self.is_done and self._works:
                work = self._works[0]
                try:
                    work.wait(_SLICE)
                except RuntimeError:
                    if work.is_completed():
                        raise
                    if self.on_slow is not None and time.monotonic() > slow:
                        why = self.on_slow(self)
                        if why:
                            self.fail(why)
                    if time.monotonic() > deadline:
                        return
                else:
                    del self._works[0]
            self._succeed()
        except Exception as error:
            self.fail(str(error))

    def _end_peer_to_peer(self) -> None:
        try:
            for work in self._works:
                work.wait()
                self.source = work._source_rank() if self._results else -1
            self._succeed()
        except Exception as error:
            self.fail(str(error))

    def _succeed(self) -> None:
        if self.is_done:
            return
        if self._after is not None:
            self._after()
        for (reference, _), host in zip(self._results, self._hosts, strict=True):
            result = reference()
            if result is not None:
                result.fill(values.adopted(host, result.geometry))
        self._close()

    def _close(self) -> None:
        self.is_done = True
        self._inputs, self._hosts, self._works = [], [], []
        self._after = None
        self._run = _nothing
        self._ended.set()


def _nothing(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Begun:
    return [], None
