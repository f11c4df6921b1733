"""Checks a module of PyTorch's database: one made on the CPU against its copy on the device."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.testing._internal.common_modules import FunctionInput, ModuleErrorEnum, ModuleInput
from torch.testing._internal.common_utils import noncontiguous_like, set_rng_seed
from torch.utils._pytree import tree_leaves, tree_map

from tools.compare import (
    Mismatch,
    NoGradient,
    assert_same,
    check_gradients,
    gradient_seeds,
    gradients,
    seed_generators,
    to_device,
)
from tools.conformance import again, generators, numbers, offsets, placement, shared, subsets, threads, tolerances
from tools.conformance.database import Entry, info_of
from tools.conformance.operators import AXES, MOST_ON_AXES
from tools.conformance.outcome import Outcome, check_same_exception, raised, raised_by_device
from tools.conformance.precision import DOUBLE, check_as_accurate, moved, rounds_elsewhere
from tools.conformance.second_order import check_second_order
from tools.conformance.subject import Form, check_calls
from tools.samples import spread
from tools.wider import WIDER, widened
from torch_tpu import hooks

CHECKS = ("construct", "forward", "gradient", "gradgrad", "strided", "errors", *AXES)

# Attributes that are no operands: with another rate of dropout, elements are others at random.
RATES = ("dropout", "p")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class ModuleRun:
    """The checks of one entry."""

    def __init__(self, entry: Entry, most: int) -> None:
        self.entry = entry
        self.info = info_of(entry)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.most = most
        self.training = entry.variant != "eval"
        self.rounds_elsewhere = rounds_elsewhere(self.dtype)
        wider = tolerances.TOLERANCES.get(entry.op)
        if wider is not None and wider.dtypes and entry.dtype not in wider.dtypes:
            wider = None
        self.rtol, self.atol = (wider.rtol, wider.atol) if wider is not None else (None, None)
        self._modules: dict[int, tuple[Any, torch.nn.Module]] = {}
        self._making = threading.Lock()
        # What the axes change of a call: which leaves need gradients, numbers of the module, where tensors lie.
        self._needs: tuple[bool, ...] | None = None
        self._numbers: dict[str, float] = {}
        self._keeps_places = False
        self._turns = itertools.count()

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        samples = spread(self.inputs(self.info.module_inputs_func), self.most)
        for i, sample in enumerate(samples):
            if not self._cpu_takes(sample):
                continue
            result.samples += 1
            # Once for an entry: a second derivative is many more programs than the first.
            for check, function in self._checks_of(sample, second_order=i == len(samples) // 2):
                if check in checks and (self.entry.op, check) not in tolerances.SKIPPED:
                    result.record(check, _summary(sample), function)
        self._along_axes(checks, result)
        if "errors" in checks and self.info.module_error_inputs_func is not None and self.dtype is torch.float32:
            for error_input in self.inputs(self.info.module_error_inputs_func):
                sample = error_input.module_error_input
                result.record("errors", _summary(sample), lambda e=error_input: self._same_error(e))
        return result

    def _along_axes(self, checks: frozenset[str], result: Outcome) -> None:
        """Makes the checks of `AXES`."""
        if not checks.intersection(AXES):
            return
        found, again_drawn = (self.inputs(self.info.module_inputs_func, seed) for seed in (0, 1))
        others = again_drawn if len(again_drawn) == len(found) else [None] * len(found)
        pairs = spread(list(zip(found, others, strict=True)), min(self.most or MOST_ON_AXES, MOST_ON_AXES))
        before, self.rounds_elsewhere = self.rounds_elsewhere, self.dtype in WIDER
        for sample, other in pairs:
            if not self._cpu_takes(sample):
                continue
            for check, function in self._axes_of(sample, other):
                if check in checks and (self.entry.op, check) not in tolerances.SKIPPED:
                    hooks.forget_programs()
                    result.record(check, _summary(sample), function)
        self.rounds_elsewhere = before

    def inputs(self, function: Callable[..., list[Any]], seed: int = 0) -> list[Any]:
        seed_generators()
        if seed:
            set_rng_seed(seed)
        return list(function(self.info, device="cpu", dtype=self.dtype, requires_grad=True, training=self.training))

    def _cpu_takes(self, sample: Any) -> bool:
        """Whether the CPU runs the sample in this dtype, which the database says of its own dtypes only."""
        return self.dtype in self.info.dtypes or raised(lambda: self.call(*self._host(sample))) is None

    def _checks_of(self, sample: Any, second_order: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        if {"device", "dtype"} <= set(inspect.signature(self.info.module_cls).parameters):
            yield "construct", lambda: self._construct(sample)
        yield "forward", lambda: self._forward(sample)
        yield "gradient", lambda: self._gradient(sample)
        if second_order and self.info.supports_gradgrad and self.dtype in DOUBLE:
            yield "gradgrad", lambda: self._second_order(sample)
        yield "strided", lambda: self._forward(sample, _strided)

    def _axes_of(self, sample: Any, other: Any | None) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "again", lambda: again.check(self, sample, other)
        strided = (self.entry.op, "strided") not in tolerances.SKIPPED
        yield "offsets", lambda: offsets.check(self, sample, strided)
        yield "numbers", lambda: self._other_numbers(sample)
        yield "generators", lambda: generators.check(self._drawing(sample))
        yield "shared", lambda: shared.check(self, sample)
        yield "subsets", lambda: self._subsets(sample)
        yield "threads", lambda: threads.check(self, sample, other)

    # --- as a subject of the axes --------------------------------------------------------------------------------

    def forms(self, sample: Any) -> Sequence[Form]:
        def unless_refused(check: Callable[[Any], None]) -> Callable[[Any], None]:
            # Not every change makes inputs that a module takes.
            return lambda s: check(s) if raised(lambda: self.call(*self._host(s))) is None else None

        return [
            Form("forward", unless_refused(self._forward)),
            Form("gradient", unless_refused(self._gradient)),
        ]

    def arguments(self, sample: Any) -> Any:
        return (sample.forward_input.args, sample.forward_input.kwargs)

    def with_arguments(self, sample: Any, nest: Any) -> Any:
        changed = FunctionInput(*nest[0], **nest[1])
        return ModuleInput(sample.constructor_input, changed, sample.desc, sample.reference_fn)

    @contextlib.contextmanager
    def keeping_places(self) -> Iterator[None]:
        """Parameters lie in longer storages inside, at another place in each copy."""
        self._keeps_places = True
        try:
            yield
        finally:
            self._keeps_places = False

    def _subsets(self, sample: Any) -> None:
        module, inputs = self._host(sample)
        count = sum(_needs_gradient(leaf) for leaf in _leaves(module, inputs))
        every = list(subsets.subsets(count))
        try:
            for needs in [*every, *every[:1]]:
                self._needs = needs
                check_calls(Form("gradient", self._gradient), [(f"gradients of {subsets.named(needs)}", sample)])
        finally:
            self._needs = None

    def _other_numbers(self, sample: Any) -> None:
        """Numbers among the arguments, and those that are attributes of the module."""
        numbers.check(self, sample, frozenset())
        attributes = {k: v for k, v in vars(self._host(sample)[0]).items() if type(v) is float and k not in RATES}
        try:
            for (name, value), form in itertools.product(attributes.items(), self.forms(sample)):
                for other in (value, value * 1.5 + 0.25, value * 0.5, value):
                    self._numbers = {name: other}
                    check_calls(form, [(f"{name} is {other}", sample)])
        finally:
            self._numbers = {}

    def _drawing(self, sample: Any) -> generators.Draw:
        host, device, host_inputs, device_inputs = self.copies(sample)

        def draw(place: str) -> Any:
            module, inputs = deepcopy((device, device_inputs) if place == "tpu" else (host, host_inputs))
            results = module(*inputs[0], **inputs[1])
            return results, gradients(results, _leaves(module, inputs), [s.to(place) for s in gradient_seeds(results)])

        return draw

    # --- the checks ----------------------------------------------------------------------------------------------

    def _construct(self, sample: Any) -> None:
        """Made on the device, a module has parameters of the CPU's dtypes and shapes."""
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        host = self.info.module_cls(*args, **{**kwargs, "device": "cpu", "dtype": self.dtype})
        args, kwargs = to_device((args, kwargs))
        device = self.info.module_cls(*args, **{**kwargs, "device": "tpu", "dtype": self.dtype})
        if self.info.is_lazy:
            return
        got, want = device.state_dict(), host.state_dict()
        _check_on_device(got)
        assert_same(*({k: torch.empty_like(t, device="cpu").zero_() for k, t in s.items()} for s in (got, want)))
        for name, value in got.items():
            if not value.isfinite().all():
                raise Mismatch("values", f"{name} is made with values that are not finite")

    def _forward(self, sample: Any, change: Callable[[Any], Any] = lambda nest: nest) -> None:
        """Results and, after it, parameters and buffers; without gradients, for which some modules have other ways."""
        host, device, host_inputs, device_inputs = self.copies(sample, change)
        with torch.no_grad():
            want = self.call(host, host_inputs)
            got = self.call(device, device_inputs)
        _check_on_device((got, device.state_dict()))
        results = (got, device.state_dict(), device_inputs), (want, host.state_dict(), host_inputs)

        def wide() -> Any:
            module, inputs = self._wide(sample, change)
            with torch.no_grad():
                result = self.call(module, inputs)
            return result, module.state_dict(), inputs

        self._same(*results, wide)

    def _gradient(self, sample: Any) -> None:
        host, device, host_inputs, device_inputs = self.copies(sample)
        want, got = self.call(host, host_inputs), self.call(device, device_inputs)
        host_leaves, device_leaves = _leaves(host, host_inputs), _leaves(device, device_inputs)
        if not self.rounds_elsewhere:
            try:
                check_gradients(got, want, device_leaves, host_leaves, self.rtol, self.atol)
            except NoGradient:
                return
            self._same((got, device.state_dict()), (want, host.state_dict()), None)
            return
        seeds = gradient_seeds(want)
        want_gradients = gradients(want, host_leaves, seeds)
        got_gradients = gradients(got, device_leaves, [s.to("tpu") for s in seeds])
        wide = self._wide_gradients(sample, seeds)
        try:
            self._same(got_gradients, want_gradients, lambda: wide, strides=False)
        except Mismatch as mismatch:
            if mismatch.kind != "values":
                raise
            # Where a ReLU's input is within rounding of 0, its gradient is anyone's guess.
            nearby = [self._wide_gradients(sample, seeds, moved_by=seed) for seed in range(8)]
            factor, _ = tolerances.FACTORS.get(self.entry.op, (2, ""))
            check_as_accurate(got_gradients, want_gradients, wide, factor=factor, nearby=nearby)

    def _wide_gradients(self, sample: Any, seeds: list[torch.Tensor], moved_by: int | None = None) -> list[Any]:
        """The gradients in the next wider dtype, where asked for of parameters and inputs that differ by rounding."""
        module, inputs = self._wide(sample)
        leaves = _leaves(module, inputs)
        if moved_by is not None:
            moved(leaves, self.dtype, moved_by)
        return gradients(self.call(module, inputs), leaves, widened(seeds, self.dtype))

    def _second_order(self, sample: Any) -> None:
        host, device, host_inputs, device_inputs = self.copies(sample)
        modules = {"cpu": host, "tpu": device}

        def call(leaves: Any) -> Any:
            place, inputs = leaves[0], leaves[1]
            return self.call(modules[place], inputs)

        try:
            check_second_order(
                call,
                ("tpu", device_inputs, list(device.parameters())),
                ("cpu", host_inputs, list(host.parameters())),
                self.rtol,
                self.atol,
            )
        except NoGradient:
            return

    def _same_error(self, error_input: Any) -> None:
        sample = error_input.module_error_input
        args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
        if error_input.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            want = raised(lambda: self.info.module_cls(*args, **kwargs))
            args, kwargs = to_device((args, kwargs))
            got = raised_by_device(lambda: self.info.module_cls(*args, **kwargs).to("tpu"))
        else:
            host, device, host_inputs, device_inputs = self.copies(sample)
            want = raised(lambda: self.call(host, host_inputs))
            got = raised_by_device(lambda: self.call(device, device_inputs))
        if want is not None:
            check_same_exception(got, want)

    # --- what they share -----------------------------------------------------------------------------------------

    def _host(self, sample: Any, change: Callable[[Any], Any] = lambda nest: nest) -> tuple[torch.nn.Module, Inputs]:
        """A module on the CPU and its inputs, the same ones at every call."""
        inputs = change((sample.forward_input.args, sample.forward_input.kwargs))
        module = self._module(sample, inputs)
        for name, number in self._numbers.items():
            setattr(module, name, number)
        inputs = (placement.copied if self._keeps_places else to_device)(inputs, "cpu")
        if self._needs is not None:
            trainable = [leaf for leaf in _leaves(module, inputs) if _needs_gradient(leaf)]
            for leaf, needs in zip(trainable, self._needs, strict=True):
                leaf.requires_grad_(needs)
        return module, inputs

    def _module(self, sample: Any, inputs: Inputs) -> torch.nn.Module:
        made = sample.constructor_input
        with self._making:
            if id(made) not in self._modules:
                args, kwargs = deepcopy((made.args, made.kwargs))
                seed_generators()
                module = self.info.module_cls(*args, **kwargs).to(self.dtype).train(self.training)
                if self.info.is_lazy:
                    # The first call makes the parameters.
                    self.call(module, to_device(inputs, "cpu"))
                self._modules[id(made)] = (made, module)
            return deepcopy(self._modules[id(made)][1])

    def _wide(self, sample: Any, change: Callable[[Any], Any] = lambda nest: nest) -> tuple[torch.nn.Module, Inputs]:
        """The same in the next wider dtype."""
        module, inputs = self._host(sample, change)
        return module.to(WIDER[self.dtype]), widened(inputs, self.dtype)

    def copies(
        self, sample: Any, change: Callable[[Any], Any] = lambda nest: nest
    ) -> tuple[torch.nn.Module, torch.nn.Module, Inputs, Inputs]:
        host, inputs = self._host(sample, change)
        device = deepcopy(host).to("tpu")
        if not self._keeps_places:
            return host, device, inputs, to_device(inputs)
        turn = next(self._turns)
        copies = placement.Copies("tpu")
        for i, (p, q) in enumerate(zip(host.parameters(), device.parameters(), strict=True)):
            p.data = placement.in_storage(p.data, offsets.OFFSETS[(i + turn) % len(offsets.OFFSETS)])
            q.data = copies(p.data)
        return host, device, inputs, tree_map(copies, inputs)

    @staticmethod
    def call(module: torch.nn.Module, inputs: Inputs) -> Any:
        seed_generators()
        return module(*inputs[0], **inputs[1])

    def _same(self, got: Any, want: Any, wide: Callable[[], Any] | None, strides: bool = True) -> None:
        try:
            assert_same(got, want, strides=strides, rtol=self.rtol, atol=self.atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounds_elsewhere or wide is None:
                raise
            check_as_accurate(got, want, wide())


def _leaves(module: torch.nn.Module, inputs: Inputs) -> list[Any]:
    return [*module.parameters(), *tree_leaves(inputs)]


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _strided(nest: Any) -> Any:
    return tree_map(lambda leaf: noncontiguous_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, nest)


def _check_on_device(nest: Any) -> None:
    for leaf in tree_leaves(nest):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "tpu":
            raise Mismatch("device", f"a result is on {leaf.device}")


def _summary(sample: Any) -> str:
    def short(leaf: Any) -> Any:
        return f"Tensor{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

    inputs = sample.forward_input
    parts = [sample.constructor_input.args, sample.constructor_input.kwargs]
    parts += [inputs.args, inputs.kwargs] if inputs is not None else []
    return f"{sample.desc} {tree_map(short, parts)}".strip()
