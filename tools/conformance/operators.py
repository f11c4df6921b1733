"""Checks an operator of PyTorch's database: the same calls on CPU tensors and on device copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.opinfo.core import SampleInput
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
from tools.conformance.outcome import Outcome, check_same_exception, raised, raised_by_device
from tools.conformance.precision import DOUBLE, check_as_accurate, is_fused, moved, rounds_elsewhere
from tools.conformance.second_order import check_second_order
from tools.conformance.subject import Form, check_calls
from tools.samples import has_elements, spread, spread_of_operator
from tools.wider import HALF, WIDER, rounded, widened
from torch_tpu import hooks

# What several calls in a row show.
AXES = ("again", "offsets", "numbers", "generators", "shared", "subsets", "threads")
CHECKS = ("forward", "gradient", "gradgrad", "strided", "inplace", "out", "errors", *AXES)
# An axis makes ten calls of a sample and more.
MOST_ON_AXES = 2
MOST_RESULTS = 4


class OperatorRun:
    """The checks of one entry."""

    def __init__(self, entry: Entry, most: int) -> None:
        self.entry = entry
        self.info = info_of(entry)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.most = most
        self.up_to_sign = entry.op in tolerances.UP_TO_SIGN
        self.rounds_elsewhere = rounds_elsewhere(self.dtype)
        self.tied = entry.op in tolerances.TIES and entry.dtype in tolerances.TIED_DTYPES
        self.host_arguments = entry.op in tolerances.HOST_ARGUMENTS
        wider = tolerances.TOLERANCES.get(entry.op)
        if wider is not None and wider.dtypes and entry.dtype not in wider.dtypes:
            wider = None
        self.rtol, self.atol = (wider.rtol, wider.atol) if wider is not None else (None, None)
        self.differentiable = self.info.supports_autograd and self.dtype in self.info.supported_backward_dtypes("cpu")
        # Results that went through several roundings need only be as near to the wider ones as the CPU's own are.
        self.as_accurate = entry.op in tolerances.AS_ACCURATE or is_fused()
        self._keeps_places = False
        # Whether 0-d tensors among the arguments stay on the host, as numbers.
        self._scalars_on_host = False

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        # The same samples whatever was checked before.
        set_rng_seed(0)
        found = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        for sample in spread_of_operator(found, self.most):
            result.samples += 1
            for check, function in self._checks_of(sample):
                if check in checks and (self.entry.op, check) not in tolerances.SKIPPED:
                    result.record(check, sample.summary(), function)
        if "gradgrad" in checks and self.differentiable and self.info.supports_gradgrad and self.dtype in DOUBLE:
            # Once for an entry: a second derivative is many more programs than the first.
            sample = _with_elements(found)
            result.record("gradgrad", sample.summary(), lambda: self._second_order(sample))
        self.along_axes(found, checks, result)
        if "errors" in checks:
            for error_input in self._error_inputs():
                sample = error_input.sample_input
                result.record("errors", sample.summary(), lambda s=sample: self._same_error(s))
        return result

    def along_axes(self, found: list[Any], checks: frozenset[str], result: Outcome) -> None:
        """Makes the checks of `AXES`."""
        if not checks.intersection(AXES):
            return
        set_rng_seed(1)
        drawn_again = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        others = drawn_again if len(drawn_again) == len(found) else [None] * len(found)
        pairs = list(zip(found, others, strict=True))
        pairs = [pair for pair in pairs if has_elements(pair[0])] or pairs
        pairs = spread(pairs, min(self.most or MOST_ON_AXES, MOST_ON_AXES))
        with self._on_axes():
            for sample, other in pairs:
                for check, function in self._axes_of(sample, other):
                    if check in checks and (self.entry.op, check) not in tolerances.SKIPPED:
                        hooks.forget_programs()
                        result.record(check, sample.summary(), function)

    @contextlib.contextmanager
    def _on_axes(self) -> Iterator[None]:
        """Inside, results that round otherwise than the CPU's are right if a wider computation says so.

        The tolerances are those of the database's own numbers.
        """
        before = self.rounds_elsewhere, self.as_accurate
        self.rounds_elsewhere = self.as_accurate = self.dtype in WIDER
        try:
            yield
        finally:
            self.rounds_elsewhere, self.as_accurate = before

    def _axes_of(self, sample: Any, other: Any | None) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "again", lambda: again.check(self, sample, other)
        strided = (self.entry.op, "strided") not in tolerances.SKIPPED
        yield "offsets", lambda: offsets.check(self, sample, strided)
        yield "numbers", lambda: self._numbers(sample)
        yield "generators", lambda: generators.check(self._drawing(sample))
        yield "shared", lambda: shared.check(self, sample)
        if self.differentiable:
            yield "subsets", lambda: subsets.check(self, sample, self._gradients_of(sample))
        yield "threads", lambda: threads.check(self, sample, other)

    # --- as a subject of the axes --------------------------------------------------------------------------------

    def forms(self, sample: Any) -> Sequence[Form]:
        def form(name: str, check: Callable[[Any], None], function: Callable[..., Any], writes: bool = False) -> Form:
            return Form(name, check, writes, lambda s: self._is_defined(function, s))

        forms = [form("forward", self._forward, self.info.op)]
        if self.differentiable:
            forms.append(form("gradient", self._gradient, self.info.op))
        if (inplace := self.info.get_inplace()) is not None:
            forms.append(form("in place", self._inplace, inplace, writes=True))
        return forms

    def _is_defined(self, function: Callable[..., Any], sample: Any) -> bool:
        nest = tree_map(lambda leaf: leaf.detach() if _is_tensor(leaf) else leaf, self.arguments(sample))
        together, apart = placement.copied(nest, "cpu"), to_device(nest, "cpu")
        if raised(lambda: self.call(function, apart)) or raised(lambda: self.call(function, together)):
            return True  # the same is raised, or nobody promises anything
        together, apart = placement.copied(nest, "cpu"), to_device(nest, "cpu")
        results = [(self.call(function, inputs), _tensors(inputs)) for inputs in (together, apart)]
        return raised(lambda: assert_same(*results, strides=False)) is None

    def arguments(self, sample: Any) -> Any:
        return (sample.input, sample.args, sample.kwargs)

    def with_arguments(self, sample: Any, nest: Any) -> Any:
        return SampleInput(
            nest[0],
            args=tuple(nest[1]),
            kwargs=dict(nest[2]),
            output_process_fn_grad=sample.output_process_fn_grad,
            broadcasts_input=sample.broadcasts_input,
            name=sample.name,
        )

    @contextlib.contextmanager
    def keeping_places(self) -> Iterator[None]:
        self._keeps_places = True
        try:
            yield
        finally:
            self._keeps_places = False

    def _gradients_of(self, sample: Any) -> list[Form]:
        """With gradients of all results, and of each alone."""
        results: list[Any] = []
        raised(lambda: results.append(self.call(self.info.op, self.copies(sample)[0])))
        count = len([t for t in _tensors(results) if t.requires_grad])
        alone = [
            Form(f"gradient of result {i}", lambda s, i=i: self._gradient(s, only=i))  # type: ignore[misc]
            for i in range(count if 1 < count <= MOST_RESULTS else 0)
        ]
        return [Form("gradient", self._gradient), *alone]

    def _numbers(self, sample: Any) -> None:
        allowed, _ = tolerances.NUMBERS.get(self.entry.op, (lambda value: True, ""))
        numbers.check(self, sample, numbers.operands(self.info.aten_name, self.arguments(sample)), allowed)
        if any(not t.dim() for t in _tensors((sample.args, sample.kwargs))):
            self._scalars_on_host = True
            try:
                for form in self.forms(sample):
                    if self._takes_host_scalars(form, sample):
                        check_calls(form, numbers.host_scalars(self, sample))
            finally:
                self._scalars_on_host = False

    @staticmethod
    def _takes_host_scalars(form: Form, sample: Any) -> bool:
        """As on other devices, not every operator takes the host's tensors as numbers."""
        refused = raised(lambda: form.check(sample))
        return refused is None or "same device" not in str(refused)

    def _drawing(self, sample: Any, on_device: Callable[..., Any] | None = None) -> generators.Draw:
        """The results and gradients of calls that seed nothing."""

        def draw(place: str) -> Any:
            inputs = self.copies(sample)[place == "tpu"]
            function = on_device if on_device is not None and place == "tpu" else self.info.op
            with without_seeds():
                results = function(inputs[0], *inputs[1], **inputs[2])
            results = sample.output_process_fn_grad(results)
            seeds = [s.to(place) for s in gradient_seeds(results)] if self.differentiable else []
            return results, gradients(results, inputs, seeds) if seeds else []

        return draw

    def _error_inputs(self) -> Iterator[Any]:
        if self.info.error_inputs_func is None or self.dtype not in (torch.float32, torch.int64):
            return
        for error_input in self.info.error_inputs("cpu"):
            sample = error_input.sample_input
            leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
            # NumPy, through which data gets to the device, has 64 dimensions at most.
            if all(t.device.type == "cpu" and t.dim() <= 64 for t in leaves if _is_tensor(t)):
                yield error_input

    def _checks_of(self, sample: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "forward", lambda: self._forward(sample)
        if self.differentiable:
            yield "gradient", lambda: self._gradient(sample)
        yield "strided", lambda: self._forward(sample.noncontiguous())
        if self.info.get_inplace() is not None:
            yield "inplace", lambda: self._inplace(sample)
        if self.info.supports_out:
            yield "out", lambda: self._out(sample)

    # --- the checks ----------------------------------------------------------------------------------------------

    def _forward(self, sample: Any) -> None:
        self._same(self.info.op, sample, self.copies(sample, detach=True))

    def _inplace(self, sample: Any) -> None:
        host, device = self.copies(sample, detach=True)
        self._same(self.info.get_inplace(), sample, (host, device))
        if self._keeps_places and not self._undefined(sample) and not self.rounds_elsewhere:
            # What lies around the arguments is as it was.
            got, want = placement.whole_storages(device), placement.whole_storages(host)
            assert_same(got, want, rtol=self.rtol, atol=self.atol)

    def _gradient(self, sample: Any, only: int | None = None) -> None:
        """Args: only: from which of the results that have a gradient it is taken; None: from all."""
        host, device = self.copies(sample)
        try:
            want = sample.output_process_fn_grad(self.call(self.info.op, host))
        except Exception:
            # Said by the forward check already.
            return
        got = sample.output_process_fn_grad(self.call(self.info.op, device))
        if self._undefined(sample) or self.tied:
            return
        if only is not None:
            got, want = ([t for t in _tensors(results) if t.requires_grad][only : only + 1] for results in (got, want))
        try:
            check_gradients(got, want, device, host, self.rtol, self.atol)
        except NoGradient:
            return
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounds_elsewhere:
                raise
            self._gradient_rounded_once(sample, only)

    def _gradient_rounded_once(self, sample: Any, only: int | None) -> None:
        host, device = self.copies(sample)
        wide = widened(host, self.dtype)

        def results(inputs: Any) -> Any:
            found = self.call(self.info.op, inputs)
            return found if only is None else [t for t in _tensors(found) if t.requires_grad][only : only + 1]

        got, want, wide_want = (results(inputs) for inputs in (device, host, wide))
        seeds = gradient_seeds(want)
        got_grads = gradients(got, device, [s.to("tpu") for s in seeds])
        wide_grads = gradients(wide_want, wide, widened(seeds, self.dtype))
        try:
            assert_same(got_grads, rounded(wide_grads, got_grads), strides=False)
        except Mismatch:
            # Of several operators, each of which rounds: where the CPU's own are no nearer.
            want_grads = gradients(want, host, seeds)
            nearby = []
            for inputs in self._moved(sample):
                nearby.append(gradients(results(inputs), inputs, widened(seeds, self.dtype)))
            check_as_accurate(got_grads, want_grads, wide_grads, nearby=nearby)

    def _second_order(self, sample: Any) -> None:
        if self._undefined(sample):
            return
        host, device = self.copies(sample)

        def call(inputs: Any) -> Any:
            return sample.output_process_fn_grad(self.call(self.info.op, inputs))

        try:
            check_second_order(call, device, host, self.rtol, self.atol)
        except NoGradient:
            return

    def _out(self, sample: Any) -> None:
        """`out=` of the right kind, with other strides, and of a dtype that may not fit."""
        (input_, args, kwargs), _ = self.copies(sample, detach=True)
        try:
            result = self.call(self.info.op, (input_, args, kwargs))
        except Exception:
            return
        if not all(_is_tensor(t) for t in tree_leaves(result)):
            return
        for make in (torch.zeros_like, _with_reversed_strides, _with_another_dtype):
            outs = tree_map(make, result)
            host, device = self.copies(sample, detach=True)
            host[2]["out"], device[2]["out"] = to_device(outs, "cpu"), to_device(outs)
            if make is _with_reversed_strides:
                # Some CPU kernels (gelu, avg_pool3d, narrow_copy) ignore the strides and write elsewhere.
                if error := raised(lambda host=host: self.call(self.info.op, host)):
                    check_same_exception(raised_by_device(lambda device=device: self.call(self.info.op, device)), error)
                    continue
                self.call(self.info.op, device)
                if not self._undefined(sample) and not self.up_to_sign and not self.tied:
                    want = tree_map(lambda r, o: torch.empty_like(o).copy_(r), result, outs)
                    self._compare(self.info.op, sample, device[2]["out"], want)
            else:
                self._same(self.info.op, sample, (host, device))

    def _same_error(self, sample: Any) -> None:
        host, device = self.copies(sample)
        if "device" not in sample.kwargs:
            # Not every operator that is given numbers alone here makes a tensor of them.
            device[2].pop("device", None)
        want = raised(lambda: self.call(self.info.op, host))
        if want is None:
            return
        check_same_exception(raised_by_device(lambda: self.call(self.info.op, device)), want)

    # --- what they share -----------------------------------------------------------------------------------------

    def _undefined(self, sample: Any) -> bool:
        """Whether nobody promises the values of the results."""
        is_random = tolerances.RANDOM_SAMPLES.get(self.entry.op, lambda sample: False)
        return self.entry.op in tolerances.VALUES_UNDEFINED or is_random(sample)

    def copies(self, sample: Any, detach: bool = False) -> tuple[Any, Any]:
        """The sample's (input, args, kwargs) twice: on the CPU and on the device."""
        nest = (sample.input, sample.args, dict(sample.kwargs))
        if detach:
            nest = tree_map(lambda leaf: leaf.detach() if _is_tensor(leaf) else leaf, nest)
        input_, args, kwargs = tree_map(lambda leaf: "tpu" if isinstance(leaf, str) and leaf == "cpu" else leaf, nest)
        move = placement.copied if self._keeps_places else to_device
        device = (move(input_), args, kwargs) if self.host_arguments else move((input_, args, kwargs))
        if self._scalars_on_host:
            device = (device[0], *tree_map(_scalar_on_host, device[1:], (args, kwargs)))
        if isinstance(input_, (int, float, complex)) and not any(_is_tensor(leaf) for leaf in tree_leaves(nest)):
            # Of the operators that make a tensor of numbers, some samples leave the device out.
            device[2].setdefault("device", "tpu")
        return move(nest, "cpu"), device

    @staticmethod
    def call(function: Callable[..., Any], inputs: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
        seed_generators()
        return function(inputs[0], *inputs[1], **inputs[2])

    def _same(self, function: Callable[..., Any], sample: Any, inputs: tuple[Any, Any]) -> None:
        host, device = inputs
        got: list[Any] = []
        want: list[Any] = []
        want_error = raised(lambda: want.append(self.call(function, host)))
        if want_error is not None:
            check_same_exception(raised_by_device(lambda: self.call(function, device)), want_error)
            return
        got.append(self.call(function, device))
        for leaf in tree_leaves(got):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "tpu":
                raise Mismatch("device", f"a result is on {leaf.device}")
        if self._undefined(sample) or self.up_to_sign:
            assert_same(tree_map(_blank, got), tree_map(_blank, want))
        if self.up_to_sign:
            got, want = ([sample.output_process_fn_grad(r) for r in results] for results in (got, want))
        if self.tied:
            compared = tolerances.TIES[self.entry.op]
            got, want = ([compared(sample, _tensors(results))] for results in (got, want))
        if self._undefined(sample):
            return
        if self.up_to_sign or self.tied:
            self._compare(function, sample, got, want)
        else:
            self._compare(function, sample, got, want, inputs)

    def _compare(
        self, function: Callable[..., Any], sample: Any, got: Any, want: Any, inputs: tuple[Any, Any] | None = None
    ) -> None:
        """Results (and arguments, which may have been written) equal the CPU's, or its float32 ones rounded once."""
        if inputs is not None:
            host, device = inputs
            got, want = (got, _tensors(device)), (want, _tensors(host))
        try:
            assert_same(got, want, strides=not self.up_to_sign, rtol=self.rtol, atol=self.atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounds_elsewhere:
                raise

            def wide_result(wide: Any) -> Any:
                result = self.call(function, wide)
                if inputs is None:
                    return result
                return result, _tensors([wide, result if "out" in inputs[0][2] else []])

            wide_want = wide_result(widened(self.copies(sample, detach=True)[0], self.dtype))
            try:
                assert_same(got, rounded(wide_want, want), strides=False)
            except Mismatch:
                if not self.as_accurate:
                    raise
                check_as_accurate(got, want, wide_want, nearby=[*map(wide_result, self._moved(sample, detach=True))])

    def _moved(self, sample: Any, detach: bool = False) -> Iterator[Any]:
        """The sample in the next wider dtype, several times, each moved by what rounding to its own dtype hides.

        Only for half precision: a sample of one element says nothing of how much a way of rounding usually costs.
        """
        for seed in range(8 if self.dtype in HALF else 0):
            inputs = widened(self.copies(sample, detach=detach)[0], self.dtype)
            moved(inputs, self.dtype, seed)
            yield inputs


def without_seeds() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators of the database that set a seed first do not."""
    plain: Callable[..., Any] = lambda operator, *args, **kwargs: operator(*args, **kwargs)  # noqa: E731
    return mock.patch.object(common_methods_invocations, "wrapper_set_seed", plain)


def _with_elements(samples: list[Any]) -> Any:
    """The sample in the middle, or the nearest one that has elements in all its tensors."""
    middle = len(samples) // 2
    by_distance = sorted(range(len(samples)), key=lambda i: abs(i - middle))
    full = (i for i in by_distance if has_elements(samples[i]))
    return samples[next(full, middle)]


def _with_reversed_strides(t: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(t.dim())))
    return torch.zeros([t.shape[i] for i in order], dtype=t.dtype).permute(order)


def _with_another_dtype(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=torch.int64)


def _blank(leaf: Any) -> Any:
    """A stand-in with the same dtype, shape and strides, whatever the values."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_() if _is_tensor(leaf) else None


def _scalar_on_host(moved: Any, given: Any) -> Any:
    return given.detach().clone() if _is_tensor(given) and not given.dim() else moved


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if _is_tensor(leaf)]
