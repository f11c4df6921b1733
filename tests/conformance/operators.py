"""Checks an operator of PyTorch's database: the same calls on CPU tensors and on device copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._pytree import tree_leaves, tree_map

from tests.compare import (
    Mismatch,
    NoGradient,
    assert_same,
    check_gradients,
    gradient_seeds,
    gradients,
    seed_generators,
    to_device,
)
from tests.conformance import tolerances
from tests.conformance.database import Entry, info_of
from tests.conformance.outcome import Outcome, check_same_exception, raised, raised_by_device, spread
from tests.conformance.precision import DOUBLE, check_as_accurate, is_fused, moved, rounds_elsewhere
from tests.conformance.second_order import check_second_order
from tests.wider import HALF, rounded, widened

CHECKS = ("forward", "gradient", "gradgrad", "strided", "inplace", "out", "errors")


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

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        # The same samples whatever was checked before.
        set_rng_seed(0)
        found = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        for sample in spread(found, self.most):
            result.samples += 1
            for check, function in self._checks_of(sample):
                if check in checks and (self.entry.op, check) not in tolerances.SKIPPED:
                    result.record(check, sample.summary(), function)
        if "gradgrad" in checks and self.differentiable and self.info.supports_gradgrad and self.dtype in DOUBLE:
            # Once for an entry: a second derivative is many more programs than the first.
            sample = _with_elements(found)
            result.record("gradgrad", sample.summary(), lambda: self._second_order(sample))
        if "errors" in checks:
            for error_input in self._error_inputs():
                sample = error_input.sample_input
                result.record("errors", sample.summary(), lambda s=sample: self._same_error(s))
        return result

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
        self._same(self.info.get_inplace(), sample, self.copies(sample, detach=True))

    def _gradient(self, sample: Any) -> None:
        host, device = self.copies(sample)
        try:
            want = sample.output_process_fn_grad(self.call(self.info.op, host))
        except Exception:
            # Said by the forward check already.
            return
        got = sample.output_process_fn_grad(self.call(self.info.op, device))
        if self._undefined(sample) or self.tied:
            return
        try:
            check_gradients(got, want, device, host, self.rtol, self.atol)
        except NoGradient:
            return
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounds_elsewhere:
                raise
            self._gradient_rounded_once(sample)

    def _gradient_rounded_once(self, sample: Any) -> None:
        host, device = self.copies(sample)
        wide = widened(host, self.dtype)
        got, want, wide_want = (self.call(self.info.op, inputs) for inputs in (device, host, wide))
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
                nearby.append(gradients(self.call(self.info.op, inputs), inputs, widened(seeds, self.dtype)))
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
        device = (to_device(input_), args, kwargs) if self.host_arguments else to_device((input_, args, kwargs))
        if isinstance(input_, (int, float, complex)) and not any(_is_tensor(leaf) for leaf in tree_leaves(nest)):
            # Of the operators that make a tensor of numbers, some samples leave the device out.
            device[2].setdefault("device", "tpu")
        return to_device(nest, "cpu"), device

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
                if self.entry.op not in tolerances.AS_ACCURATE and not is_fused():
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


def _with_elements(samples: list[Any]) -> Any:
    """The sample in the middle, or the nearest one that has elements in all its tensors."""
    middle = len(samples) // 2
    by_distance = sorted(range(len(samples)), key=lambda i: abs(i - middle))
    full = (i for i in by_distance if all(t.numel() for t in _tensors((samples[i].input, samples[i].args))))
    return samples[next(full, middle)]


def _with_reversed_strides(t: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(t.dim())))
    return torch.zeros([t.shape[i] for i in order], dtype=t.dtype).permute(order)


def _with_another_dtype(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=torch.int64)


def _blank(leaf: Any) -> Any:
    """A stand-in with the same dtype, shape and strides, whatever the values."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_() if _is_tensor(leaf) else None


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if _is_tensor(leaf)]
