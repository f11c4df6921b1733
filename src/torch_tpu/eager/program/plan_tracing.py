"""Makes plans: traces a call once on meta tensors (`ops.tracing.tracer`) inside a module under construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.eager.program.plan import Alias, Call, Fresh, Input, Plan, data_dtype, fill, new_target
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import guard, module, strided
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.tracing.moving_views import MovingView
from torch_tpu.ops.tracing.tracer import Base, Data, Tracer
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import Geometry, geometry


class _Builder:
    """Traces one Call; holds what the trace produced besides the program."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.parameters: list[tuple[str, int]] = []
        self.specs: list[module.Spec] = []
        for i, spec in enumerate(call.inputs):
            if spec.storage == i:
                self._parameter("base", i, (tuple(spec.geometry.sizes), spec.geometry.dtype))
        for i, spec in enumerate(call.inputs):
            if spec.starts:
                self._parameter("starts", i, ((spec.starts,), torch.int32))
        for i, value in enumerate(call.data):
            self._parameter("data", i, ((), data_dtype(value, call.wide)))
        for i, dtype in enumerate(call.hosts):
            self._parameter("host", i, ((), dtype))
        self._parameter("rng", 0, ((2,), torch.uint64))
        self.rng: Rng | None = None

    def _parameter(self, kind: str, index: int, spec: module.Spec) -> None:
        self.parameters.append((kind, index))
        self.specs.append(spec)

    def body(self, *arrays: Array) -> Sequence[Array]:
        given = dict(zip(self.parameters, arrays, strict=True))

        def rng() -> Rng:
            if self.rng is None:
                self.rng = Rng(given["rng", 0])
            return self.rng

        self.tracer = tracer = Tracer(rng=rng, checks=self.call.checks)
        self.bases: dict[int, Base] = {}
        self.tensors: list[torch.Tensor] = []
        storages: dict[int, torch.UntypedStorage] = {}
        moving = {spec.storage for spec in self.call.inputs if spec.starts}
        for i, spec in enumerate(self.call.inputs):
            if spec.storage == i:
                base = Base(given["base", i], spec.geometry.sizes, spec.geometry.strides, spec.geometry.dtype)
                self.bases[i] = base
                storages[i] = tracer.add_storage(base, spec.nbytes)
            tensor = torch.empty(0, dtype=spec.dtype, device="meta")
            tensor.set_(storages[spec.storage], spec.offset, spec.sizes, spec.strides)
            if spec.conj:
                tensor = tensor.conj()
            if spec.storage in moving:
                tracer.followed.add(tensor, _window(i, spec, self.bases[spec.storage], given.get(("starts", i))))
            self.tensors.append(tensor)
        hosts = []
        for i, dtype in enumerate(self.call.hosts):
            tensor = torch.empty((), dtype=dtype, device="meta")
            tracer.add_host_scalar(tensor, given["host", i])
            hosts.append(tensor)
        data = [Data(value, given["data", i]) for i, value in enumerate(self.call.data)]
        table: dict[str, Sequence[Any]] = {"input": self.tensors, "host": hosts, "data": data}
        args, kwargs = fill((self.call.args, self.call.kwargs), table)
        self.returned = self.call.function(tracer, args, kwargs)

        self.results: list[Array] = []
        self.fresh_index: dict[int, int] = {}
        self.tree = self._describe(self.returned)
        self.writes = []
        for i, base in self.bases.items():
            if base.written:
                g = geometry(base.sizes, base.strides, base.dtype)
                self.writes.append((i, len(self.results), g))
                self.results.append(self._written(base, self.call.inputs[i].geometry, given["base", i]))
        self.check_slots = []
        for condition, message, error, value in tracer.checks:
            slot = len(self.results)
            self.check_slots.append((slot, message, error, None if value is None else slot + 1))
            self.results.extend([condition] if value is None else [condition, value])
        return self.results

    def _written(self, base: Base, g: Geometry, old: Array) -> Array:
        """The new value of a storage; the old one where a condition does not hold and only the program can choose."""
        new = base.value()
        conditions = [condition for condition, *_ in self.tracer.checks]
        if not conditions or new.size != old.size or new.dtype is not old.dtype:
            return new
        if new.shape != old.shape or base.strides != g.strides:
            # The same memory, with its dimensions in another order.
            old = strided.read(
                old, *strided.view_steps(g.sizes, g.strides, base.sizes, base.strides, 0, g.dtype, base.dtype)
            )
        elif self.call.guarded:
            return guard.kept_unless(conditions, new, old)
        elif any(True for _ in old.value.uses):
            return new  # the old value is an argument, so whoever runs the program can choose
        for condition in conditions:
            new = hlo.select(condition, new, old)
        return new

    def _source(self, returned: torch.Tensor) -> int | None:
        """The input that a tensor is a view of."""
        window = self.tracer.followed.window(returned)
        if window is not None:
            return window.index
        storage = returned.untyped_storage()
        for i, tensor in enumerate(self.tensors):
            if tensor.untyped_storage()._cdata == storage._cdata:
                self.tracer.followed.lost |= self.tracer.followed.moves(storage)
                return i
        return None

    def _describe(self, returned: Any) -> Any:
        if not isinstance(returned, torch.Tensor):
            if isinstance(returned, (list, tuple)):
                described = [self._describe(r) for r in returned]
                return described if isinstance(returned, list) else tuple(described)
            return returned
        for i, tensor in enumerate(self.tensors):
            if tensor is returned:
                return Alias(i, True)
        place = (tuple(returned.shape), returned.stride(), int(returned.storage_offset()))
        source = self._source(returned)
        if source is not None:
            begins, own = (int(t.storage_offset()) * t.itemsize for t in (self.tensors[source], returned))
            return Alias(source, False, *place[:2], own - begins, returned.dtype)
        base = self.tracer.base(returned)
        if id(base) not in self.fresh_index:
            self.fresh_index[id(base)] = len(self.results)
            self.results.append(base.value())
        g = geometry(base.sizes, base.strides, base.dtype)
        whole = returned.numel() * returned.element_size() == g.nbytes
        contiguous = whole and returned.stride() == strided.contiguous_strides(returned.shape)
        return Fresh(self.fresh_index[id(base)], g, *place, returned.dtype, contiguous)


def _window(index: int, spec: Input, base: Base, starts: Array | None) -> MovingView:
    steps, first = strided.view_steps(
        base.sizes, base.strides, spec.sizes, spec.strides, spec.offset, base.dtype, spec.dtype
    )
    given = (
        first if starts is None else [hlo.reshape(hlo.slice_in_dim(starts, k, k + 1), ()) for k in range(len(first))]
    )
    return MovingView(index, spec.sizes, spec.dtype, (steps, given))


def _named(name: str, body: Callable[..., Sequence[Array]]) -> Callable[..., Sequence[Array]]:
    """`body`, whose operations are to say which operator they come from where the client wants that."""
    if not client().names_operators:
        return body

    def build(*arrays: Array) -> Sequence[Array]:
        with module.named(name):
            return body(*arrays)

    return build


def make_plan(call: Call, platform: str | None = None) -> Plan:
    """Traces a call; raises what PyTorch raises for wrong arguments, and NoLowering.

    Args:
        platform: what the program is for, by PJRT's name; the client's by default.
    """
    with module.building, metrics.timed("trace_seconds"):
        builder = _Builder(call)
        target = new_target(platform)
        built, results = module.build(call.name, target, builder.specs, _named(call.name, builder.body))
        used = module.drop_unused_parameters(built)
        operations = module.operations(built)
    arguments = [p for p, is_used in zip(builder.parameters, used, strict=True) if is_used]
    metrics.count("program")
    return Plan(
        call.name,
        built,
        [spec for spec, is_used in zip(builder.specs, used, strict=True) if is_used],
        results,
        operations,
        target,
        bases=tuple(i for kind, i in arguments if kind == "base"),
        starts=tuple((i, call.inputs[i].starts) for kind, i in arguments if kind == "starts"),
        data=tuple((i, data_dtype(call.data[i], call.wide)) for kind, i in arguments if kind == "data"),
        hosts=tuple((i, call.hosts[i]) for kind, i in arguments if kind == "host"),
        for_offsets=builder.tracer.followed.lost,
        uses_rng=("rng", 0) in arguments,
        draws=builder.rng.drawn if builder.rng is not None else 0,
        writes=tuple(builder.writes),
        checks=tuple(builder.check_slots),
        guarded=call.guarded,
        returned=builder.tree,
    )
