"""Fused eager: the operators a thread has recorded and not yet run.

A recorded operator is a plan and where its arguments come from. Its results are `Pending` values, which become
buffers when their part of the graph, a chunk, has run as one program (`eager.chunk`). A chunk computes what somebody
still refers to, nothing else. The graph runs when a value is needed, and piece by piece while it grows, so that the
device works while Python records.

Where a growing graph is cut depends on the operators around the place alone: of the possible places it is the one
with the smallest digest. So equal layers are cut into equal chunks, whatever came before them, and compile once.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_tpu import metrics
from torch_tpu.eager import chunk, hooks
from torch_tpu.eager.plan import Plan
from torch_tpu.metrics import places
from torch_tpu.metrics.places import Place
from torch_tpu.runtime import memory
from torch_tpu.runtime.client import Buffer, client
from torch_tpu.tensor import transfer
from torch_tpu.tensor.errors import translate
from torch_tpu.tensor.storage import Geometry, Value, geometry

# A growing graph is cut when it has twice as many operators as this, behind the first so many.
SHORTEST_CHUNK = 64
# So many programs with conditions that nobody has looked at yet are enough; then the oldest are looked at.
MOST_UNREAD = 64


class Pending(Value):
    """A result that is not computed before somebody needs it."""

    __slots__ = ("_buffer", "graph", "slot")

    def __init__(self, graph: Graph, slot: int, geometry: Geometry) -> None:
        self.graph: Graph | None = graph
        self.slot = slot
        self.geometry = geometry
        self._buffer: Buffer | None = None

    @property
    def array(self) -> Buffer:  # type: ignore[override]
        """The buffer; asking for it runs what leads to it.

        Raises:
            RuntimeError: where running it failed.
        """
        graph = self.graph
        if graph is not None:
            graph.flush("read")
            if self.graph is not None:
                raise RuntimeError("this tensor was never computed: the program it was part of failed")
        return self._buffer

    def fill(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.graph = None
        memory.counter.add(self.geometry.nbytes)

    def __del__(self) -> None:
        if self._buffer is not None:
            memory.counter.remove(self.geometry.nbytes)


class Unread(NamedTuple):
    """A condition that a recorded operator states (an index in bounds), and what to raise where it does not hold.

    Attributes:
        shown: what stands for {} in the message.
        operator, place: what stated it, and where in the user's program.
    """

    condition: Pending
    message: str
    error: type[Exception]
    shown: Pending | None
    operator: str
    place: Place


class Graph:
    """What one thread has recorded. `plans`, `wires`, `numbers`, `firsts` and `places` have one entry per operator.

    Attributes:
        wires: where each of its values comes from: entry n of `buffers`, or ~n for slot n.
        numbers: see `chunk.Numbers`.
        firsts: the slot of its first result.
        places: the user's code that called it.
        calls: the first operator of each call. A call for lists records one operator per entry, and is never cut.
        slots: from slot `base` on, each result's Pending value for as long as somebody refers to it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.plans: list[Plan] = []
        self.wires: list[list[int]] = []
        self.numbers: list[chunk.Numbers] = []
        self.firsts: list[int] = []
        self.places: list[Place] = []
        self.calls: list[int] = []
        self.same_call = False
        self.slots: list[weakref.ref[Pending] | None] = []
        self.base = 0
        self.buffers: list[Buffer] = []
        self._index: dict[int, int] = {}
        _graphs.add(self)

    def record(self, plan: Plan, values: Sequence[Value], numbers: chunk.Numbers) -> int:
        """Adds an operator; returns the slot of its first result.

        Args:
            values: of the call's inputs, each a buffer or pending here.
        """
        wires = []
        for i in plan.bases:
            value = values[i]
            if type(value) is Pending and value.graph is self:
                wires.append(~value.slot)
                continue
            buffer = value.array
            index = self._index.get(id(buffer))
            if index is None:
                index = self._index[id(buffer)] = len(self.buffers)
                self.buffers.append(buffer)
            wires.append(index)
        first = self.base + len(self.slots)
        if not self.same_call:
            self.calls.append(len(self.plans))
        self.plans.append(plan)
        self.wires.append(wires)
        self.numbers.append(numbers)
        self.firsts.append(first)
        self.places.append(places.here(4))
        self.slots.extend(plan.no_slots)
        for slot, message, kind, shown in plan.checks:
            condition = self.value(first + slot, _SCALAR_BOOL)
            number = None if shown is None else self.value(first + shown, geometry((), (), plan.results[shown][1]))
            _unread.append(Unread(condition, message, kind, number, plan.name, self.places[-1]))
        return first

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """What is recorded inside belongs to one call."""
        self.calls.append(len(self.plans))
        self.same_call = True
        try:
            yield
        finally:
            self.same_call = False

    def value(self, slot: int, geometry: Geometry) -> Pending:
        """A new value for a slot."""
        value = Pending(self, slot, geometry)
        self.slots[slot - self.base] = weakref.ref(value)
        return value

    def grown(self) -> None:
        """Runs the first part of a graph that has become long, unless a call is being recorded."""
        if not self.same_call:
            metrics.note("flush", "grown long")
            with self.lock:
                self._run(self._cut())

    def flush(self, cause: str) -> None:
        """Runs everything recorded."""
        with self.lock:
            if self.plans:
                metrics.note("flush", metrics.waited_for() or cause)
                self._run(len(self.plans))
        settle(MOST_UNREAD)

    def _cut(self) -> int:
        """The place between two operators whose surroundings have the smallest digest."""
        plans = self.plans

        def digest(n: int) -> int:
            return ((plans[n - 2].digest * 3 + plans[n - 1].digest) * 5 + plans[n].digest) * 0x9E3779B1 & 0xFFFFFFFF

        return min(self.calls[SHORTEST_CHUNK:], key=digest)

    def _run(self, count: int) -> None:
        """Runs the first `count` operators. An interruption leaves the graph as it was."""
        plans, wires, later = self.plans[:count], self.wires[:count], self.wires[count:]
        base = self.base
        end = self.firsts[count] if later else base + len(self.slots)
        used_later = {~w - base for operands in later for w in operands if w < 0 and ~w < end}
        alive = self._alive(end - base)
        outputs = tuple(sorted(alive.keys() | used_later))
        code: list[int] = []
        externals: dict[int, int] = {}
        for plan, operands in zip(plans, wires, strict=True):
            code.append(plan.number)
            for w in operands:
                code.append(w + base if w < 0 else externals.setdefault(w, len(externals)))
        arguments = [self.buffers[w] for w in externals]
        try:
            results = chunk.run(chunk.find(tuple(code), outputs, plans, self.places), arguments, self.numbers[:count])
        except Exception as error:
            self._run_one_by_one(error)
            return
        for n, value in alive.items():
            value.fill(results[n])
        self._forget(count, end, results)

    def _alive(self, count: int) -> dict[int, Pending]:
        """The values of the first `count` slots that somebody refers to."""
        found = ((n, reference()) for n, reference in enumerate(self.slots[:count]) if reference is not None)
        return {n: value for n, value in found if value is not None}

    def _run_one_by_one(self, error: Exception) -> None:
        """After a failure: computes all that can be computed, and says which operator failed.

        Raises:
            The failure of the first operator that fails by itself; nothing where all succeed.
        """
        results: dict[int, Buffer] = {}
        failure = None
        for plan, wires, numbers, slot, place in zip(
            self.plans, self.wires, self.numbers, self.firsts, self.places, strict=True
        ):
            inputs = [self.buffers[w] if w >= 0 else results.get(~w) for w in wires]
            if any(i is None for i in inputs):
                continue
            try:
                made = plan.compiled()([*inputs, *chunk.separate_numbers(plan, numbers)])
            except Exception as own:
                failure = failure or _located(own, f"in {plan.name}, called at {places.where(place)}")
                continue
            results.update(zip(range(slot, slot + len(made)), made, strict=True))
        for n, value in self._alive(len(self.slots)).items():
            if self.base + n in results:
                value.fill(results[self.base + n])
        self._forget(len(self.plans), self.base + len(self.slots), {})
        for check in list(_unread):
            if check.condition.graph is self:
                _take(check)  # of an operator that was never computed
        if failure is not None:
            raise failure from error

    def _forget(self, count: int, end: int, results: dict[int, Buffer]) -> None:
        """Drops the first `count` operators; what later ones need of their results are buffers now."""
        base, buffers = self.base, self.buffers
        self.plans, self.wires, self.numbers = self.plans[count:], self.wires[count:], self.numbers[count:]
        self.firsts, self.places = self.firsts[count:], self.places[count:]
        self.calls = [n - count for n in self.calls if n >= count]
        self.slots, self.base = self.slots[end - base :], end
        self.buffers, self._index = [], {}
        for operands in self.wires:
            for k, w in enumerate(operands):
                if w >= 0 or ~w < end:
                    buffer = buffers[w] if w >= 0 else results[~w - base]
                    index = self._index.get(id(buffer))
                    if index is None:
                        index = self._index[id(buffer)] = len(self.buffers)
                        self.buffers.append(buffer)
                    operands[k] = index


def _located(error: Exception, place: str) -> Exception:
    translated = translate(error, place)
    return RuntimeError(f"{error} ({place})") if translated is error else translated


_SCALAR_BOOL = geometry((), (), torch.bool)
_unread: deque[Unread] = deque()


def settle(most: int = 0) -> None:
    """Looks at the conditions of programs that have run, until at most so many are left; waits for those programs.

    Raises:
        The error of the first that does not hold. The others are then forgotten: they may follow from it.
    """
    ready = [check for check in list(_unread) if check.condition.graph is None]
    for n, check in enumerate(ready[: max(len(ready) - most, 0)]):
        if not _take(check):
            continue
        if not client().get_bool(check.condition.array):
            for other in ready[n + 1 :]:
                _take(other)
            text = check.message if check.shown is None else check.message.format(client().get(check.shown.array))
            raise check.error(f"{text} (in {check.operator}, called at {places.where(check.place)})")


def _take(check: Unread) -> bool:
    """Whether it was still unread: another thread may look at the same time."""
    try:
        _unread.remove(check)
    except ValueError:
        return False
    return True


_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
_threads = threading.local()


def current() -> Graph:
    """The graph of this thread."""
    try:
        found: Graph = _threads.graph
    except AttributeError:
        found = _threads.graph = Graph()
    return found


def flush_all(cause: str) -> None:
    """Runs what every thread has recorded, and looks at its conditions."""
    for found in list(_graphs):
        found.flush(cause)
    settle()


hooks.flush = flush_all
transfer.before_reading = settle
