"""Checks one entry: the same calls on CPU tensors and on device copies, everything a user can see compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.compare import Mismatch, NoGradient, assert_same, check_gradients, gradient_seeds, gradients, to_device
from tests.conformance import tolerances
from tests.conformance.database import Entry, info_of
from torch_tpu import metrics
from torch_tpu.eager import execute

CHECKS = ("forward", "gradient", "strided", "inplace", "out", "errors")
# More differences than this of one entry say nothing new.
MOST_FAILURES = 8


@dataclass
class Failure:
    """One difference.

    Attributes:
        check: which of `CHECKS` found it.
        kind: what differs: "values", "dtype", "shape", "strides", "raises RuntimeError", "accepts", ...
        sample: the inputs, shortened.
    """

    check: str
    kind: str
    sample: str
    message: str


@dataclass
class Outcome:
    """What checking an entry found.

    Attributes:
        fallbacks: operators that ran on the CPU, and how often.
    """

    samples: int = 0
    failures: list[Failure] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Difference(Exception):
    """One side raises what the other does not."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def run(entry: Entry, *, samples: int = 0, checks: Iterable[str] = CHECKS) -> Outcome:
    """Checks an entry on at most `samples` sample inputs spread over all of them (0: on all)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _Run(entry, samples).outcome(frozenset(checks))
    # Nothing of one operator helps the next, and thousands of programs fill the memory.
    execute.clear_plans()
    return outcome


class _Run:
    def __init__(self, entry: Entry, most: int) -> None:
        self.entry = entry
        self.info = info_of(entry)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.most = most
        self.up_to_sign = entry.op in tolerances.UP_TO_SIGN
        self.rounded_once = entry.dtype in tolerances.ROUNDED_ONCE
        self.tied = entry.op in tolerances.TIES and entry.dtype in tolerances.TIED_DTYPES
        self.host_arguments = entry.op in tolerances.HOST_ARGUMENTS
        wider = tolerances.TOLERANCES.get(entry.op)
        if wider is not None and wider.dtypes and entry.dtype not in wider.dtypes:
            wider = None
        self.rtol, self.atol = (wider.rtol, wider.atol) if wider is not None else (None, None)
        self.differentiable = self.info.supports_autograd and self.dtype in self.info.supported_backward_dtypes("cpu")

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        before = _fallbacks()
        for sample in self._samples():
            result.samples += 1
            for check, function in self._checks_of(sample):
                wanted = check in checks and (self.entry.op, check) not in tolerances.SKIPPED
                if wanted and len(result.failures) < MOST_FAILURES:
                    _record(result.failures, check, sample, function)
        result.fallbacks = {k: n - before.get(k, 0) for k, n in _fallbacks().items() if n != before.get(k, 0)}
        if "errors" in checks:
            for error_input in self._error_inputs():
                sample = error_input.sample_input
                _record(result.failures, "errors", sample, lambda s=sample: self._same_error(s))
        return result

    def _samples(self) -> list[Any]:
        found = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        if not self.most or len(found) <= self.most:
            return found
        return [found[i * len(found) // self.most] for i in range(self.most)]

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
        self._same(self.info.op, sample, self._copies(sample, detach=True))

    def _inplace(self, sample: Any) -> None:
        self._same(self.info.get_inplace(), sample, self._copies(sample, detach=True))

    def _gradient(self, sample: Any) -> None:
        host, device = self._copies(sample)
        try:
            want = sample.output_process_fn_grad(self._call(self.info.op, host))
        except Exception:
            # Said by the forward check already.
            return
        got = sample.output_process_fn_grad(self._call(self.info.op, device))
        if self._undefined(sample) or self.tied:
            return
        try:
            check_gradients(got, want, device, host, self.rtol, self.atol)
        except NoGradient:
            return
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounded_once:
                raise
            self._gradient_rounded_once(sample)

    def _gradient_rounded_once(self, sample: Any) -> None:
        host, device = self._copies(sample)
        wide = _as_float32(host)
        got, want, wide_want = (self._call(self.info.op, inputs) for inputs in (device, host, wide))
        seeds = gradient_seeds(want)
        got_grads = gradients(got, device, [s.to("tpu") for s in seeds])
        wide_grads = gradients(wide_want, wide, [s.float() for s in seeds])
        assert_same(got_grads, _rounded(wide_grads, got_grads), strides=False)

    def _out(self, sample: Any) -> None:
        """`out=` of the right kind, with other strides, and of a dtype that may not fit."""
        (input_, args, kwargs), _ = self._copies(sample, detach=True)
        try:
            result = self._call(self.info.op, (input_, args, kwargs))
        except Exception:
            return
        if not all(_is_tensor(t) for t in tree_leaves(result)):
            return
        for make in (torch.zeros_like, _with_reversed_strides, _with_another_dtype):
            outs = tree_map(make, result)
            host, device = self._copies(sample, detach=True)
            host[2]["out"], device[2]["out"] = to_device(outs, "cpu"), to_device(outs)
            if make is _with_reversed_strides:
                # Some CPU kernels (gelu, avg_pool3d, narrow_copy) ignore the strides and write elsewhere.
                if error := _raised(lambda host=host: self._call(self.info.op, host)):
                    _same_exception(_raised(lambda device=device: self._call(self.info.op, device)), error)
                    continue
                self._call(self.info.op, device)
                if not self._undefined(sample) and not self.up_to_sign and not self.tied:
                    want = tree_map(lambda r, o: torch.empty_like(o).copy_(r), result, outs)
                    self._compare(self.info.op, sample, device[2]["out"], want)
            else:
                self._same(self.info.op, sample, (host, device))

    def _same_error(self, sample: Any) -> None:
        host, device = self._copies(sample)
        want = _raised(lambda: self._call(self.info.op, host))
        if want is None:
            return
        _same_exception(_raised(lambda: self._call(self.info.op, device)), want)

    # --- what they share -----------------------------------------------------------------------------------------

    def _undefined(self, sample: Any) -> bool:
        """Whether nobody promises the values of the results."""
        is_random = tolerances.RANDOM_SAMPLES.get(self.entry.op, lambda sample: False)
        return self.entry.op in tolerances.VALUES_UNDEFINED or is_random(sample)

    def _copies(self, sample: Any, detach: bool = False) -> tuple[Any, Any]:
        """The sample's (input, args, kwargs) twice: on the CPU and on the device."""
        nest = (sample.input, sample.args, dict(sample.kwargs))
        if detach:
            nest = tree_map(lambda leaf: leaf.detach() if _is_tensor(leaf) else leaf, nest)
        input_, args, kwargs = tree_map(lambda leaf: "tpu" if isinstance(leaf, str) and leaf == "cpu" else leaf, nest)
        device = (to_device(input_), args, kwargs) if self.host_arguments else to_device((input_, args, kwargs))
        return to_device(nest, "cpu"), device

    @staticmethod
    def _call(function: Callable[..., Any], inputs: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
        torch.manual_seed(0)
        return function(inputs[0], *inputs[1], **inputs[2])

    def _same(self, function: Callable[..., Any], sample: Any, inputs: tuple[Any, Any]) -> None:
        host, device = inputs
        got: list[Any] = []
        want: list[Any] = []
        want_error = _raised(lambda: want.append(self._call(function, host)))
        if want_error is not None:
            _same_exception(_raised(lambda: self._call(function, device)), want_error)
            return
        got.append(self._call(function, device))
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
        if not self._undefined(sample) and not self._compare(function, sample, got, want):
            return
        if not self._undefined(sample) and not self.up_to_sign and not self.tied:
            assert_same(_tensors(device), _tensors(host), rtol=self.rtol, atol=self.atol)

    def _compare(self, function: Callable[..., Any], sample: Any, got: Any, want: Any) -> bool:
        """Raises Mismatch where results differ; False if they equal only the CPU's float32 results, rounded once."""
        try:
            assert_same(got, want, strides=not self.up_to_sign, rtol=self.rtol, atol=self.atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not self.rounded_once:
                raise
            wide = _as_float32(self._copies(sample, detach=True)[0])
            assert_same(got, _rounded(self._call(function, wide), want), strides=False)
            return False
        return True


def _record(failures: list[Failure], check: str, sample: Any, function: Callable[[], None]) -> None:
    try:
        function()
    except (Mismatch, Difference) as difference:
        kind, message = difference.kind, str(difference)
    except Exception as error:
        kind, message = f"raises {type(error).__name__}", str(error)
    else:
        return
    failures.append(Failure(check, kind, sample.summary()[:400], message[:600]))


def _with_reversed_strides(t: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(t.dim())))
    return torch.zeros([t.shape[i] for i in order], dtype=t.dtype).permute(order)


def _with_another_dtype(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=torch.int64)


def _blank(leaf: Any) -> Any:
    """A stand-in with the same dtype, shape and strides, whatever the values."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_() if _is_tensor(leaf) else None


def _as_float32(nest: Any) -> Any:
    """Leaves of half precision as float32, dtypes among the arguments as well."""

    def widen(leaf: Any) -> Any:
        if _is_tensor(leaf) and leaf.dtype in (torch.bfloat16, torch.float16):
            return leaf.detach().float().requires_grad_(leaf.requires_grad)
        is_half = isinstance(leaf, torch.dtype) and leaf in (torch.bfloat16, torch.float16)
        return torch.float32 if is_half else leaf

    return tree_map(widen, nest)


def _rounded(nest: Any, like: Any) -> list[Any]:
    """The leaves of one nest in the dtypes of those of another, which may be only the first ones."""
    pairs = zip(tree_leaves(nest), tree_leaves(like), strict=False)
    return [leaf.to(other.dtype) if _is_tensor(leaf) else leaf for leaf, other in pairs]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if _is_tensor(leaf)]


def _raised(function: Callable[[], Any]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _same_exception(got: Exception | None, want: Exception) -> None:
    if got is None:
        raise Difference(f"accepts what raises {type(want).__name__}", f"the CPU raises: {want}")
    if not isinstance(got, type(want)):
        raise Difference(
            f"raises {type(got).__name__} instead of {type(want).__name__}", f"{got}\nthe CPU raises: {want}"
        )


def _fallbacks() -> dict[str, int]:
    prefix = "fallback::"
    return {k.removeprefix(prefix): int(v) for k, v in metrics.counters().items() if k.startswith(prefix)}
