"""Checks an operator of PyTorch's database under torch.compile: one graph, one program, and the same as eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._pytree import tree_leaves

from tools.compare import Mismatch, assert_same, to_device
from tools.conformance import generators
from tools.conformance.database import Entry
from tools.conformance.operators import AXES, OperatorRun, without_seeds
from tools.conformance.outcome import Outcome, raised
from tools.conformance.precision import check_as_accurate
from tools.conformance.subject import Form
from tools.samples import spread_of_operator
from tools.wider import widened
from torch_tpu import metrics

CHECKS = ("compiled", "compiled_inplace", *AXES)

# Dynamo takes half a second for each, and more samples of one operator say little about a compiler.
MOST_SAMPLES = 2
# Of one function, for each number and each subset of gradients.
MOST_GRAPHS = 256

_EQUAL = "PyTorch asks whether two tensors are equal, for a Python bool"
_VIEWS = "the in-place form changes how an input views its memory"
_WARNS = "PyTorch warns, which Dynamo does not trace"
# Operators of which Dynamo captures some sample on no device: where the device fails, the CPU must too.
NOT_CAPTURED: dict[str, str] = {
    **dict.fromkeys(("allclose", "corrcoef", "cov", "equal"), _EQUAL),
    **dict.fromkeys(("resize_", "resize_as_", "squeeze", "t", "transpose", "unsqueeze"), _VIEWS),
    **dict.fromkeys(("_foreach_max", "_foreach_mm", "register_hook"), "Dynamo does not trace this function"),
    "addbmm": "the in-place form on a tensor that would have to grow, which eager mode does",
    "as_strided": _VIEWS,
    "combinations": "PyTorch loses track of a size that depends on data",
    "linalg.lstsq": "PyTorch has no meta kernel for it",
    "nn.functional.ctc_loss": "PyTorch has no meta kernel for it",
    "nn.functional.gaussian_nll_loss": "PyTorch asks whether any variance is negative, for a Python bool",
    "polygamma": "functionalization refuses the in-place form",
    "masked_select": "PyTorch assumes that no more is selected than there is, but operands broadcast",
    "nn.functional.linear_cross_entropy": _WARNS,
    "nn.functional.one_hot": "the size of a result depends on data, and PyTorch asks for it",
}
# The same for any device but the CPU: of the CPU's 0-d tensors alone PyTorch knows the number while it captures; and
# PyTorch's min-cut partitioner, which the CPU's stand-in does not use, does not take this operator of Inductor apart.
NOT_CAPTURED_ON_DEVICES = frozenset({"narrow", "invoke_quant"})
# Operators with results, or intermediate results of the gradient, whose sizes depend on data: their graphs run operator
# by operator. (The gradient of index_fill by its value looks at each filled place once; that of a loop at each step.)
SIZES_FROM_DATA = frozenset(
    {
        "argwhere",
        "bincount",
        "combinations",
        "index_fill",
        "masked_select",
        "nonzero",
        "unique",
        "unique_consecutive",
        "while_loop_stack_output",
    }
)
# PyTorch asks whether the factorisation succeeded by an operator with an effect, which runs between two programs.
CHECKED_BETWEEN_PROGRAMS = frozenset(
    {
        *("linalg.cholesky", "linalg.eig", "linalg.eigvals", "linalg.inv", "linalg.ldl_factor", "linalg.lu_factor"),
        *("linalg.matrix_power", "linalg.solve", "linalg.tensorinv", "linalg.tensorsolve"),
    }
)
# Higher-order operators that are no part of a program: of Inductor, and for functions that write their arguments.
NOT_LOWERED = frozenset({"auto_functionalize", "invoke_quant_packed"})
_MAY_BE_CUT = SIZES_FROM_DATA | CHECKED_BETWEEN_PROGRAMS | NOT_LOWERED


class CompiledRun(OperatorRun):
    """The checks of one entry. The device's eager results are what is compared with; other kinds compare those."""

    def __init__(self, entry: Entry, most: int) -> None:
        super().__init__(entry, min(most or MOST_SAMPLES, MOST_SAMPLES))

    def outcome(self, checks: frozenset[str]) -> Outcome:
        self._result = Outcome()
        with _capturing():
            self._check(checks, self._result)
        return self._result

    def _check(self, checks: frozenset[str], result: Outcome) -> None:
        set_rng_seed(0)
        found = list(self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        samples = spread_of_operator(found, self.most)
        for sample in samples:
            result.samples += 1
            if "compiled" in checks:
                result.record("compiled", sample.summary(), lambda s=sample: self._compiled(self.info.op, s, result))
        inplace = self.info.get_inplace()
        if "compiled_inplace" in checks and inplace is not None and samples:
            sample = samples[-1]
            result.record(
                "compiled_inplace", sample.summary(), lambda: self._compiled(inplace, sample, result, detach=True)
            )
        self.along_axes(found, checks, result)

    def forms(self, sample: Any) -> Sequence[Form]:
        """One compiled function for all calls; compared with eager, gradients as well."""
        compiled = _compiled(self.info.op, "tpu")
        # Counted with the other checks.
        own = Outcome()

        def is_defined(other: Any) -> bool:
            return self._is_defined(self.info.op, other)

        return [Form("compiled", lambda s: self._same_as_eager(compiled, self.info.op, s, own), False, is_defined)]

    def _gradients_of(self, sample: Any) -> Sequence[Form]:
        return self.forms(sample)

    def _drawing(self, sample: Any, on_device: Callable[..., Any] | None = None) -> generators.Draw:
        return super()._drawing(sample, _compiled(self.info.op, "tpu"))

    def _compiled(self, function: Callable[..., Any], sample: Any, result: Outcome, detach: bool = False) -> None:
        self._same_as_eager(_compiled(function, "tpu"), function, sample, result, detach)

    def _same_as_eager(
        self,
        compiled: Callable[..., Any],
        function: Callable[..., Any],
        sample: Any,
        result: Outcome,
        detach: bool = False,
    ) -> None:
        host, device = self.copies(sample, detach)
        eager = self.copies(sample, detach)[1]
        seeds: list[torch.Tensor] = []
        want: list[Any] = []
        if raised(lambda: want.extend(self._results(function, eager, seeds))) is not None:
            # The other kinds compare what is raised.
            return
        by_operator = _by_operator()
        try:
            got = self._results(compiled, device, seeds)
        except Exception:
            fails = self.entry.op in NOT_CAPTURED and self._cpu_fails(function, sample)
            if fails or self.entry.op in NOT_CAPTURED_ON_DEVICES:
                return
            raise
        if _by_operator() != by_operator and self.entry.op not in _MAY_BE_CUT:
            raise Mismatch("programs", "the graph ran operator by operator")
        if any(isinstance(g, str) for g in want[-1]) and not any(isinstance(g, str) for g in got[-1]):
            # A gradient that is refused for what its numbers are: no compiled graph looks at them, the CPU's neither.
            want[-1] = got[-1] = ()
        want = to_device(want, "cpu")
        result.inexact += not all(map(_equal, tree_leaves(got), tree_leaves(want)))
        try:
            # Of views with gaps, PyTorch's decompositions copy some that eager mode returns as they are.
            for g, w, strides in zip(got, want, (not self._keeps_places, True, False), strict=True):
                assert_same(g, w, strides=strides, rtol=self.rtol, atol=self.atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or self._undefined(sample):
                raise
            # Products and sums become one instruction, with one rounding instead of two.
            check_as_accurate(got, want, self._results(function, widened(host, torch.float32), seeds))

    def _results(self, function: Callable[..., Any], inputs: Any, seeds: list[torch.Tensor]) -> list[Any]:
        """What the function returns, its arguments afterwards, and its gradients for seeds made at the first call."""
        returned = self.call(function, inputs)
        roots, leaves = _differentiable(returned), [t for t in _differentiable(inputs) if t.is_leaf]
        if not seeds:
            seeds += [torch.randn(t.shape, dtype=torch.complex64).cpu() for t in roots]
        own = [s.to(t.dtype).to(t.device) for s, t in zip(seeds, roots, strict=True)]
        try:
            found = torch.autograd.grad(roots, leaves, own, allow_unused=True) if roots and leaves else ()
        except RuntimeError as error:
            found = (str(error),)
        return [returned, _tensors(inputs), found]

    def _cpu_fails(self, function: Callable[..., Any], sample: Any) -> bool:
        inputs = self.copies(sample, detach=True)[0]
        return raised(lambda: self._results(_compiled(function, "aot_eager"), inputs, [])) is not None


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch.compiler.reset()
    # Not the operator itself, which Dynamo may not take for a function.
    return torch.compile(lambda *args, **kwargs: function(*args, **kwargs), fullgraph=True, backend=backend)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Everything that Dynamo can capture, and operators of the database as they are, without the seed set inside."""
    options = {
        "capture_dynamic_output_shape_ops": True,
        "capture_scalar_outputs": True,
        "recompile_limit": MOST_GRAPHS,
        "accumulated_recompile_limit": MOST_GRAPHS,
    }
    with torch._dynamo.config.patch(options), without_seeds():
        yield


def _by_operator() -> float:
    counters = metrics.counters()
    return counters.get("graph_by_operator", 0) + counters.get("graph_cut", 0)


def _equal(got: Any, want: Any) -> bool:
    if not isinstance(want, torch.Tensor):
        return bool(got == want) or (got != got and want != want)
    return got.shape == want.shape and torch.equal(*(_bits(t.detach().cpu()) for t in (got, want)))


def _bits(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    whole = t.contiguous()
    # All NaN are one.
    return whole.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) if t.is_floating_point() else whole


def _differentiable(nest: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(nest) if t.requires_grad]


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
