"""Fused eager: the operators a thread has recorded and not yet run.

A recorded operator is a plan and where its arguments come from. Its results are `Pending` values, which become
buffers when their segment of the graph has run as one program (`eager.deferred.segment`). A segment computes what
somebody still refers to, nothing else. The graph runs when a value is needed, and segment by segment while it grows, so
that the device works while Python records.

Where a growing graph is cut depends on the operators around the place alone: it is the place with the smallest digest
of those that keep few temporaries (`eager.deferred.temporaries`), on a TPU of those over which the fewest bytes cross.
So equal layers are cut into equal segments, whatever came before them, and compile once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from torch_tpu import metrics
from torch_tpu.eager.deferred import runtime_checks, segment, temporaries
from torch_tpu.eager.deferred.pending import Failed, NotReadyError, Pending
from torch_tpu.eager.deferred.runtime_checks import Condition, Write, owner
from torch_tpu.eager.host import compile_refused
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.plan import Plan, ScalarArguments
from torch_tpu.hlo.strided import contiguous_strides
from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.runtime.client import Buffer, client_errors, launch
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.errors import translate
from torch_tpu.tensor.storage import UNSHARED, Content, Geometry, Taken, Value, geometry, references

# A growing graph is cut when it has twice as many operators as this, behind the first so many.
SHORTEST_SEGMENT = 64
LONGEST = 2 * SHORTEST_SEGMENT
# The same once its results have so many bytes. What a segment reads lives until it has run, and so do many of its
# temporaries: with long segments a GPT's training step took 1.6 times the memory of the CPU's, with these 1.04.
LARGE = 2**20
SHORTEST_LARGE_SEGMENT = 4
# On a TPU: its compiler orders a program by memory, and what crosses from one program to the next is written to HBM.
SHORTEST_LARGE_SEGMENT_OF_TPU = 32
# So many programs with conditions that nobody has looked at yet are enough; then the oldest are looked at.
MOST_UNREAD = 64


# Where forward created each node of the autograd graph, by PyTorch's number for it; kept on topologies only.
_nodes: dict[int, CallSite] = {}


def _forward_place(found: CallSite) -> CallSite:
    """Of an operator called at `found`; for backward, where the user's program called what this is the gradient of."""
    node: Any = torch._C._current_autograd_node()
    if node is not None:
        return _nodes.get(node._sequence_nr(), found)
    if len(_nodes) > 2**20:
        _nodes.clear()
    _nodes[torch.autograd._get_sequence_nr() - 1] = found
    return found


# A plan; where each of its values comes from, entry n of `inputs` or ~n for slot n; the numbers it takes; the slot of
# its first result; the user's code that called it.
Recorded = tuple[Plan, list[int], ScalarArguments, int, CallSite]


class DeferredGraph:
    """What one thread has recorded.

    Attributes:
        operators: in their order.
        inner: those that are not the first of their call. A call for lists records one for each entry, and is never
            cut.
        slots: from slot `base` on, each result's Pending value for as long as somebody refers to it.
        inputs: the values they read; those to which nothing else refers are donated to the last program that does.
        index: the position of each in `inputs`, by its id.
        nbytes: of all results.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.operators: list[Recorded] = []
        self.inner: list[int] = []
        self.call: int | None = None  # how many operators of one call for lists are recorded
        self.slots: list[weakref.ref[Pending] | None] = []
        self.base = 0
        self.inputs: list[Content] = []
        self.nbytes = 0
        self.index: dict[int, int] = {}
        self._follows_backward = client().names_operators
        self._runs_on_cpu = client().runs_on_cpu

    def record(
        self, plan: Plan, values: Sequence[Content], numbers: ScalarArguments, write: Write | None = None
    ) -> Pending | int:
        """Adds an operator; returns the result of a simple plan, else the slot of the first result.

        Args:
            values: of the call's inputs.
            write: what happens only if the plan's conditions hold.

        Raises:
            NotReadyError: where one of them can't be read yet; then nothing is recorded.
        """
        lock = self.lock
        lock.acquire()  # `with` takes twice the time
        try:
            wires = []
            index = self.index
            for i in plan.bases:
                value = values[i]
                if value.graph is self:
                    wires.append(~value.slot)  # type: ignore[attr-defined]
                else:
                    known = index.get(id(value))
                    wires.append(self._input(value) if known is None else known)
            operators, slots = self.operators, self.slots
            first = self.base + len(slots)
            place = user_lines.here(4)
            if self._follows_backward:
                place = _forward_place(place)
            if self.call is not None:
                if self.call:
                    self.inner.append(len(operators))
                self.call += 1
            if plan.is_simple:
                result = Pending(self, first, plan.returned.geometry)
                results: Sequence[weakref.ref[Pending] | None] = (ref(result),)
            else:
                results = plan.no_slots
            # Without a call between these, an interruption finds both done or neither.
            slots += results
            operators += ((plan, wires, numbers, first, place),)
            self.nbytes += plan.nbytes
            if plan.is_simple:
                return result
            for slot, message, kind, shown in plan.checks:
                holds = self.value(first + slot, _SCALAR_BOOL)
                number = None if shown is None else self.value(first + shown, geometry((), (), plan.results[shown][1]))
                runtime_checks.unread.append(Condition(holds, message, kind, number, plan.name, place, write, owner()))
            return first
        finally:
            lock.release()

    def _input(self, value: Content) -> int:
        """The position of a value in `inputs`."""
        position = self.index.get(id(value))
        if position is None:
            if value.graph is not None or isinstance(value, Taken) or value.array is None:
                raise NotReadyError
            position = self.index[id(value)] = len(self.inputs)
            self.inputs.append(value)
        return position

    def next_slot(self) -> int:
        return self.base + len(self.slots)

    def forget_conditions(self, slot: int) -> None:
        """Drops the conditions of what was recorded from a slot on: of a call that fails for another reason."""
        runtime_checks.forget(lambda holds: holds.graph is self and holds.slot >= slot)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """What is recorded inside belongs to one call."""
        self.call = 0
        try:
            yield
        finally:
            self.call = None

    def value(self, slot: int, geometry: Geometry) -> Pending:
        """A new value for a slot."""
        value = Pending(self, slot, geometry)
        self.slots[slot - self.base] = weakref.ref(value)
        return value

    def grown(self) -> None:
        """Runs the first part of a graph that has become long, unless a call is being recorded."""
        large = SHORTEST_LARGE_SEGMENT if self._runs_on_cpu else SHORTEST_LARGE_SEGMENT_OF_TPU
        shortest = SHORTEST_SEGMENT if self.nbytes < LARGE else large
        with self.lock:  # another thread may have run it meanwhile
            if len(self.operators) - len(self.inner) >= 2 * shortest and self.call is None:
                metrics.note("flush", "grown long")
                self._run(self._cut(shortest))

    def flush(self, cause: str) -> None:
        """Runs everything recorded."""
        with self.lock:
            if self.operators:
                metrics.note("flush", metrics.waited_for() or cause)
                self._run(len(self.operators))
        runtime_checks.settle(MOST_UNREAD)

    def _cut(self, shortest: int) -> int:
        """The place between two operators, not before so many calls, whose surroundings have the smallest digest."""
        digests = [plan.digest for plan, *_ in self.operators]

        def digest(n: int) -> int:
            return ((digests[n - 2] * 3 + digests[n - 1]) * 5 + digests[n]) * 0x9E3779B1 & 0xFFFFFFFF

        calls = self._calls()
        if self._runs_on_cpu:
            ends = calls[shortest:]
            if shortest < SHORTEST_SEGMENT:
                ends = temporaries.few(ends, self.operators, self.slots, self.base, LARGE)
            return min(ends, key=digest)
        crossing = self._crossing(calls, shortest)
        return min(crossing, key=lambda n: (crossing[n], digest(n)))

    def _calls(self) -> list[int]:
        """The first operator of each call."""
        inner = set(self.inner)
        return [n for n in range(len(self.operators)) if n not in inner]

    def _crossing(self, calls: Sequence[int], shortest: int) -> dict[int, int]:
        """The bytes of earlier results that the calls behind each place read soon.

        The last places are left out: what would read over them is not recorded yet.
        """
        sizes = [nbytes for plan, *_ in self.operators for nbytes in plan.sizes]
        near = shortest // 4
        found = {}
        for k in range(shortest, len(calls) - near):
            n = calls[k]
            first = self.operators[n][3]
            behind = self.operators[n : calls[k + near]]
            read = {~w for _, wires, *_ in behind for w in wires if w < 0 and ~w < first}
            found[n] = sum(sizes[slot - self.base] for slot in read)
        return found

    def _run(self, count: int) -> None:
        """Runs the first `count` operators. An interruption leaves the graph as it was, or comes when they have run."""
        plans, wires, numbers, _, user_places = zip(*self.operators[:count], strict=True)
        later = self.operators[count:]
        base = self.base
        end = later[0][3] if later else base + len(self.slots)
        used_later = {w for _, operands, *_ in later for w in operands}
        alive = self._alive(end - base)
        outputs = tuple(sorted(alive.keys() | {~w - base for w in used_later if w < 0 and ~w < end}))
        code: list[int] = []
        externals: dict[int, int] = {}
        for plan, operands in zip(plans, wires, strict=True):
            code.append(plan.number)
            for w in operands:
                code.append(w + base if w < 0 else externals.setdefault(w, len(externals)))
        indices = list(externals)
        made: dict[int, Content] = {}
        enqueued: list[Any] = []
        try:
            found = segment.find(tuple(code), outputs, plans, user_places)
            donated = tuple(
                e
                for e in found.aliases
                if indices[e] not in used_later and references(self.inputs, indices[e]) == UNSHARED
            )
            program = found.program(donated, plans, user_places)
        except client_errors() as error:
            self._run_refused(count, error)
            return
        except Exception as error:
            self._run_one_by_one(error, {})
            return
        try:
            arguments = segment.arguments(program, [self.inputs[w].array for w in indices], numbers)
            try:
                launch([part.compiled.executable for part in program], arguments, enqueued)
            finally:
                for part, run in zip(program, enqueued, strict=False):
                    buffers = part.compiled.executable.results(run)
                    for e in part.donated:
                        self.inputs[indices[e]] = _DONATED
                    for n, buffer in zip(part.outputs, buffers, strict=True):
                        made[n] = alive[n] if n in alive else Value(buffer, _result_geometry(plans, n))
                        if n in alive:
                            alive[n].fill(buffer)
                metrics.count("execute", len(enqueued))
                if len(enqueued) == len(program):
                    self._forget(count, end, made)
        except Exception as error:
            self._run_one_by_one(error, made)

    def _run_refused(self, count: int, error: Exception) -> None:
        """Runs operators that the compiler refuses as one program: one half after the other, one alone on the CPU."""
        if count > 1:
            self._run(count // 2)
            if self.operators:  # a failure runs all there are
                self._run(count - count // 2)
            return
        plan, wires, numbers, slot, place = self.operators[0]
        try:
            results = self._on_cpu(plan, [self.inputs[w].array for w in wires], numbers, place, error)
        except Exception as own:
            self._run_one_by_one(own, {})
            return
        made: dict[int, Content] = {}
        alive = self._alive(len(results))
        for n, buffer in enumerate(results):
            made[n] = alive[n] if n in alive else Value(buffer, _result_geometry((plan,), n))
            if n in alive:
                alive[n].fill(buffer)
        self._forget(1, slot + len(results), made)

    def _on_cpu(
        self, plan: Plan, operands: list[Buffer], numbers: ScalarArguments, place: CallSite, error: Exception
    ) -> list[Buffer]:
        """The results of an operator that the compiler refuses; later calls like it don't ask the compiler."""
        why = plan_table.why_refused(error)
        plan_table.refuse(plan, why)
        return compile_refused.run_on_cpu(plan, operands, numbers, place, why)

    def _alive(self, count: int) -> dict[int, Pending]:
        """The values of the first `count` slots that somebody refers to."""
        found = ((n, reference()) for n, reference in enumerate(self.slots[:count]) if reference is not None)
        return {n: value for n, value in found if value is not None}

    def _run_one_by_one(self, error: Exception, made: Mapping[int, Content]) -> None:
        """After a failure: computes all that can be computed, and says which operator failed.

        Args:
            made: what ran before it, by slot from `base` on.

        Raises:
            The failure of the first operator that fails by itself. Where all succeed, nothing if the runtime failed,
            such as for want of memory; another error is a fault of this package, and must not make it slow in silence.
        """
        metrics.count("fused_failure")
        results: dict[int, Buffer] = {self.base + n: value.array for n, value in made.items()}
        inputs = [value.array for value in self.inputs]
        failure = None
        for plan, wires, numbers, slot, place in self.operators:
            operands = [inputs[w] if w >= 0 else results.get(~w) for w in wires]
            if any(operand is None or operand.is_deleted() for operand in operands):
                continue
            called = f"in {plan.name}, called at {user_lines.where(place)}"
            try:
                try:
                    executable = plan.compiled()
                except client_errors() as own:
                    buffers = self._on_cpu(plan, operands, numbers, place, own)
                else:
                    given = [*operands, *segment.separate_numbers(plan, numbers)]
                    for a, *_ in plan.reused:
                        given[a] = client().copy(given[a])
                    buffers = executable(given)
            except Exception as own:
                try:
                    failure = failure or _located(own, called)
                except Exception as unexpected:
                    failure = unexpected  # a fault in the message must not keep the graph from being forgotten
                # What it was to write keeps its value, as where the call itself fails.
                results.update((slot + k, operand) for k, operand in _written(plan, operands))
                continue
            results.update((slot + k, buffer) for k, buffer in enumerate(buffers) if slot + k not in results)
        for n, value in self._alive(len(self.slots)).items():
            if self.base + n not in results:
                value.graph = Failed()
            elif n not in made:
                value.fill(results[self.base + n])
        self._forget(len(self.operators), self.base + len(self.slots), {})
        runtime_checks.forget(lambda holds: isinstance(holds.graph, Failed))
        if failure is None and not isinstance(error, _OF_RUNTIME):
            failure = RuntimeError(
                "internal error of torch_tpu: recorded operators did not become a program "
                f"({type(error).__name__}: {error}), and ran one by one"
            )
        if failure is not None:
            raise failure from error

    def _forget(self, count: int, end: int, made: Mapping[int, Content]) -> None:
        """Drops the first `count` operators; what later ones need of their results are inputs now."""
        base, inputs = self.base, self.inputs
        self.operators = self.operators[count:]
        self.inner = [n - count for n in self.inner if n >= count]
        self.nbytes = sum(plan.nbytes for plan, *_ in self.operators)
        self.slots, self.base = self.slots[end - base :], end
        self.inputs, self.index = [], {}
        for _, operands, *_ in self.operators:
            for k, w in enumerate(operands):
                if w >= 0 or ~w < end:
                    operands[k] = self._input(inputs[w] if w >= 0 else made[~w - base])


# What fails outside of this package; jaxlib's errors are RuntimeErrors.
_OF_RUNTIME = (RuntimeError, MemoryError, OSError)


# In place of an input that was donated.
_DONATED = Value(None, geometry((0,), (1,), torch.uint8))


def _result_geometry(plans: Sequence[Plan], n: int) -> Geometry:
    """Of result n of some operators, in row-major order."""
    shape, dtype = next(itertools.islice((spec for plan in plans for spec in plan.results), n, None))
    return geometry(shape, contiguous_strides(shape), dtype)


def _written(plan: Plan, operands: Sequence[Buffer]) -> Iterator[tuple[int, Buffer]]:
    """The old values of what an operator writes, by the result that is the new one."""
    for i, result, _ in plan.writes:
        if i in plan.bases and plan.values[plan.bases.index(i)] == plan.results[result]:
            yield result, operands[plan.bases.index(i)]


def _located(error: Exception, place: str) -> Exception:
    translated = translate(error, place)
    if translated is not error:
        return translated
    kind = type(error) if type(error) in (IndexError, NotImplementedError) else RuntimeError
    return kind(f"{error} ({place})")


_SCALAR_BOOL = geometry((), (), torch.bool)
