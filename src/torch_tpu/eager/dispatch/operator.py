"""`Operator`: the Python kernel of one ATen overload on the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from torch_tpu import hooks, metrics
from torch_tpu.eager import mode
from torch_tpu.eager.deferred import thread_graphs
from torch_tpu.eager.dispatch import fast_path
from torch_tpu.eager.dispatch.fast_path import ANY, LAST_INT8, PLAIN, SHARED
from torch_tpu.eager.dispatch.launch import launch
from torch_tpu.eager.host import scalar_check, shape_churn
from torch_tpu.eager.host.fallback import as_cpu_raises, policy, run_on_cpu
from torch_tpu.eager.host.memory_overlap import check_overlap
from torch_tpu.eager.host.shape_churn import HostedCall
from torch_tpu.eager.overload_table import Row, overload, row_of, rows
from torch_tpu.eager.program import plan_table
from torch_tpu.eager.program.call_signature import LAST_INT64, CallSignature, Changed, computes_wide, placeholders
from torch_tpu.eager.program.plan import Call, Plan
from torch_tpu.hooks import check_device
from torch_tpu.ops.core import derived
from torch_tpu.ops.core.argument_mapper import mapped
from torch_tpu.ops.core.schema import signature
from torch_tpu.ops.tracing.cpu_acceptance import check_kinds, has_domain
from torch_tpu.runtime.process_client import client

if TYPE_CHECKING:
    from torch_tpu.ops.tracing.tracer import Tracer

# What each call looks up.
# Floats that every float dtype takes in a computation.
LARGEST = torch.finfo(torch.float32).max
INFINITE = (float("inf"), float("-inf"))
_Tensor = torch.Tensor
_matmul_precision = torch._C._get_float32_matmul_precision
_find = plan_table.fast_path_plans.get
_counters = metrics.counts.counters
_default_dtype = torch.get_default_dtype


class Operator:
    """A dispatcher kernel: signature → plan → results. Calling it is running the operator."""

    __slots__ = (
        "data",
        "full_name",
        "func",
        "generator",
        "has_domain",
        "keyword_data",
        "name",
        "reads_precision",
        "row",
        "sig",
        "wide",
        "writes",
    )
    kind = "operator"

    def __init__(self, name: str, row: Row) -> None:
        """`name` is that of the overload, such as "aten::add.Tensor"."""
        self.row = row
        self.full_name = name
        # Whether one of its programs so far depends on the precision of float32 products.
        self.reads_precision = False

    def look_up(self) -> None:
        """Looks at the overload: not before the first call, because few of all overloads are ever called."""
        func = self.func = overload(self.full_name)
        self.name = func._schema.name.partition("::")[2]
        self.sig = signature(func)
        data = self.row.data
        self.data = tuple(derived.is_data(func, a) for a in self.sig.arguments) if data is None else data
        self.keyword_data = {a.name: d for a, d in zip(self.sig.arguments, self.data, strict=True)}
        self.wide = self.row.wide
        self.writes = self.row.writes
        self.has_domain = has_domain(func)
        # Where a generator stands among the positional arguments.
        self.generator = self.sig.positions.get("generator", len(self.sig.arguments))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.forked is not None:
            hooks.forked()
        if kwargs or self.writes:
            return self._call_any(args, kwargs, None)
        # Down to `_call_any` this is `eager.dispatch.fast_path`, here because one more function would cost too much.
        key: list[Any] = [self, _default_dtype()]
        if self.reads_precision:
            key.append(_matmul_precision())
        values: list[Any] = []
        data: list[int | float] = []
        last = None
        for t, is_data in zip(args, self.data):  # noqa: B905  (defaults are left out, and `strict` costs time)
            if isinstance(t, _Tensor):
                storage = t.untyped_storage()
                try:
                    value = storage.value  # type: ignore[attr-defined]
                except AttributeError:
                    break
                g = value.geometry
                if t.dtype is not g.real or t.shape != g.sizes or t.stride() != g.strides or t.storage_offset():
                    break
                if storage is last:
                    key.append(SHARED)
                last = storage
                key.append(g)
                values.append(value)
            elif is_data is True and (
                (t.__class__ is float and (-LARGEST <= t <= LARGEST or t in INFINITE))
                or (t.__class__ is int and t <= LAST_INT64)
            ):
                key.append(t.__class__)
                if not 0 <= t <= LAST_INT8:
                    key.append(ANY)
                data.append(t)
            elif t.__class__ in PLAIN and (is_data is False or t is None):
                key.append(t)
            elif t.__class__ is bool and is_data is False:
                key.append(bool)
                key.append(t)
            else:
                break
        else:
            plan = _find(tuple(key))
            if plan is not None:
                _counters["compile_cache_hit"] += 1
                return launch(plan, values, data)
            return self._call_any(args, kwargs, key)
        return self._call_any(args, kwargs, None)

    def _call_any(self, args: tuple[Any, ...], kwargs: dict[str, Any], key_of_simple: list[Any] | None) -> Any:
        """A call that is not known as a simple one; if it can become one, it is from now on."""
        device = kwargs.get("device")
        if device is not None and device.type != "tpu":
            return _made_elsewhere(self.func, args, kwargs, device)
        sig = CallSignature([self])
        sig.arguments(args, self.data)
        generator = args[self.generator] if len(args) > self.generator else None
        if kwargs:
            for name, value in kwargs.items():
                sig.key.append(name)
                sig.argument(value, self.keyword_data[name])
                if name == "generator":
                    generator = value
                elif name == "device":
                    check_device(value)
        if self.writes and len({id(s) for s in sig.storages}) < len(sig.storages):
            check_overlap(self.func, args, kwargs)
        key = sig.finish()
        plan = plan_table.known_plan(key, sig)
        if sig.data and plan is not None:
            scalar_check.judge(self.func, args, kwargs, sig.tensors, sig.data)
        if plan.__class__ is not Plan:
            if plan is None or (plan.__class__ is HostedCall and plan.is_worth_a_program()):
                plan = self._new_plan(key, sig, args, kwargs, plan is None)
            if plan.__class__ is HostedCall:
                return shape_churn.run(self.func, args, kwargs)
            if isinstance(plan, plan_table.Unsupported):
                return run_on_cpu(self.func, args, kwargs, plan.reason)
        if key_of_simple is not None and not self._looks_at_numbers(sig):
            fast_path.keep(key_of_simple, plan, sig)
        try:
            return launch(plan, sig.values, sig.data, sig, generator)
        except Changed:
            return self._call_any(args, kwargs, None)

    def _looks_at_numbers(self, sig: CallSignature) -> bool:
        """Whether numbers of a simple call with the same key can be wrong ones."""
        if not sig.data or all(t.dtype.is_floating_point for t in sig.tensors):
            return bool(sig.data) and self.has_domain
        in_all = all(0 <= n <= LAST_INT8 for n in sig.data)
        return self.has_domain or not in_all or any(t.dtype is torch.bool for t in sig.tensors)

    def _new_plan(
        self, key: tuple[Any, ...], sig: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any], few: bool
    ) -> Any:
        """The plan of a call that has none; if it has had `few` calls, the host may run it instead."""
        kind = shape_churn.kind_of(self.func, args, kwargs)
        try:
            if kind is not None and few and shape_churn.runs_on_host(kind, self.func, args, kwargs):
                return plan_table.keep(key, HostedCall())
            plan = plan_table.find_plan(
                key,
                sig,
                lambda: self._call(sig, args, kwargs),
                lambda: check_kinds(self.func, args, kwargs),
            )
        except Exception as error:
            known = as_cpu_raises(self.func, args, kwargs, error)
            try:
                if known is not error or policy() == "error" or isinstance(error, torch.OutOfMemoryError):
                    raise known from None
            finally:
                del known  # an error that its own traceback refers to keeps the call's tensors alive
            # The CPU takes it: some meta kernels refuse more.
            plan = plan_table.keep(key, plan_table.Unsupported(f"{type(error).__name__}: {error}"))
        if kind is not None:
            shape_churn.made(kind)
        return plan

    def _call(self, sig: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        taken: dict[str, int] = {}
        filled = tuple(placeholders(v, sig, d, taken) for v, d in zip(args, self.data, strict=False))
        keyword = {n: placeholders(v, sig, self.keyword_data[n], taken) for n, v in kwargs.items()}
        if "device" in self.keyword_data:
            keyword["device"] = torch.device("meta")
        keyword.pop("pin_memory", None)
        return Call(
            self._trace,
            self.name,
            filled,
            keyword,
            sig.inputs(),
            list(sig.data),
            [t.dtype for t in sig.hosts],
            self.wide or computes_wide(sig, [*args, *kwargs.values()]),
            checks_bounds(),
            identity=self.full_name,
            func=self.func,
        )

    @property
    def title(self) -> str:
        """For reports: `add.Tensor`."""
        return self.func.name().removeprefix("aten::").removesuffix(".default")

    @property
    def argument_names(self) -> list[str]:
        """For reports."""
        return [a.name for a in self.sig.arguments]

    def _trace(self, tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tracer.call(self.func, args, kwargs)

    def __repr__(self) -> str:
        return f"Operator({self.func})"


# Strict modes run a longer list in equal groups, which share a program: for the 292 parameters of a GPT of 24 layers
# AdamW compiles in 0.7 s of processor time instead of 1.8, and 24 programs start where one did.
LONGEST_LIST = 128


class ListOperator(Operator):
    """An operator that does the same to each entry of its lists: `_foreach_add`, `_fused_adamw_`.

    In fused mode each entry is recorded by itself, so that equal entries share a program, however many there are. In
    strict modes a long list is run in equal groups.
    """

    __slots__ = ("lists", "tells_autograd")

    def look_up(self) -> None:
        super().look_up()
        self.tells_autograd = derived.writes_lists(self.func)
        self.lists = {a.name for a in self.sig.arguments if a.is_tensor_list or a.is_data_list}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = self._entries(args, kwargs)
        if mode.fused and count > 1:
            with thread_graphs.current().one_call():
                returned = self._in_groups([[i] for i in range(count)], args, kwargs)
        elif count > LONGEST_LIST:
            returned = self._in_groups(_equal_groups(args[0]), args, kwargs)
        else:
            returned = super().__call__(*args, **kwargs)
        if self.tells_autograd:
            # Autograd has to be told of writes to the entries of a list.
            torch.autograd.graph.increment_version(args[0])
            return None
        return returned

    def _in_groups(self, groups: Sequence[Sequence[int]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operator with some entries at a time."""
        names = [a.name for a in self.sig.arguments]
        results: dict[int, Any] = {}
        for group in groups:
            given = [self._some(v, name, group) for v, name in zip(args, names, strict=False)]
            keywords = {name: self._some(v, name, group) for name, v in kwargs.items()}
            results.update(zip(group, super().__call__(*given, **keywords) or (), strict=False))
        return [results[i] for i in range(len(results))] or None

    def _entries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How many entries the lists have; 0 where that is not one number, which the operator itself refuses."""
        named = dict(zip((a.name for a in self.sig.arguments), args, strict=False)) | kwargs
        lengths = {len(v) for name, v in named.items() if name in self.lists and v}
        return lengths.pop() if len(lengths) == 1 else 0

    def _some(self, value: Any, name: str, entries: Sequence[int]) -> Any:
        return [value[i] for i in entries] if name in self.lists and value else value


class _NewOperator(Operator):
    """An operator before its first call: the first attribute that is missing makes it an `Operator`.

    So those that are called pay nothing for it: a `__getattr__` of their own class would slow each attribute down.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return _looked_up(self, Operator, name)


class _NewListOperator(ListOperator):
    """The same for lists."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return _looked_up(self, ListOperator, name)


def _looked_up(operator: Operator, kind: type[Operator], attribute: str) -> Any:
    # Two threads may come here at once: both find the same.
    kind.look_up(operator)
    operator.__class__ = kind
    return getattr(operator, attribute)


def _equal_groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of tensors in groups that have as many of each shape and dtype, and one group of what is left.

    Many groups take long to start, few have many entries to compile, in one of them and in what is left.
    """
    places: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        places.setdefault((t.shape, t.dtype), []).append(i)
    counts = [len(p) for p in places.values()]
    groups = min(range(1, max(counts) + 1), key=lambda g: g + sum(n // g + n % g for n in counts))
    each = [(p, len(p) // groups) for p in places.values()]
    found = [[i for p, n in each for i in p[g * n : (g + 1) * n]] for g in range(groups)]
    found.append([i for p, n in each for i in p[groups * n :]])
    return [group for group in found if group]


def _made_elsewhere(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """A tensor like one of the device's (`zeros_like`, `new_full`) on another device, which needs no contents of it."""

    def like(t: torch.Tensor) -> torch.Tensor:
        if t.device.type != "tpu":
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    return func(*mapped(args, like, device), **kwargs)


def checks_bounds() -> bool:
    """Whether programs check index bounds: on XLA:CPU always, elsewhere by `TORCH_TPU_CHECK_BOUNDS=1`."""
    return client().runs_on_cpu or os.environ.get("TORCH_TPU_CHECK_BOUNDS", "0") == "1"


_programs: dict[str, Operator] = {}


def as_program(func: OpOverload) -> Callable[..., Any]:
    """The kernel that runs an overload as a compiled program."""
    name = func.name()
    return _programs.get(name) or program_named(name, rows().get(name) or row_of(name, func))


def program_named(name: str, row: Row) -> Operator:
    """The same, by the overload's name; the overload itself is looked at when the kernel is first called."""
    found = _programs.get(name)
    if found is None:
        found = _programs.setdefault(name, _NewListOperator(name, row) if row.is_list else _NewOperator(name, row))
    return found
