"""Checks an optimizer of PyTorch's database: the same steps on the CPU and on the device."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.testing._internal.common_optimizers import OptimizerErrorEnum
from torch.utils._pytree import tree_map

from tools.compare import Mismatch, assert_same
from tools.conformance import threads, tolerances
from tools.conformance.course import Course
from tools.conformance.database import Entry, info_of
from tools.conformance.outcome import Outcome, check_same_exception, raised, raised_by_device
from tools.conformance.precision import check_as_accurate, moved, rounds_elsewhere
from tools.conformance.subject import saying
from tools.samples import spread
from tools.wider import HALF, widened
from torch_tpu import hooks

AXES = ("again", "offsets", "numbers", "shared", "subsets", "threads")
CHECKS = ("step", "state_dict", "errors", *AXES)
STEPS = 3
PLAIN = Course()
# Which of the parameters get no gradient in which step.
ABSENT = (frozenset({0}), frozenset({1, 2}), frozenset[int]())
SHAPES = ((5, 4), (3,), (), (0, 2))
# Muon takes matrices only.
MATRICES = ((5, 4), (2, 3), (1, 1))
# Contradictory options, which the database lists for CUDA alone.
CONTRADICTIONS = ({"foreach": True, "fused": True}, {"fused": True, "differentiable": True})


class OptimizerRun:
    """The checks of one entry: every configuration of an optimizer in one implementation and dtype."""

    def __init__(self, entry: Entry, most: int) -> None:
        self.entry = entry
        self.info = info_of(entry)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.most = most
        self.differentiable = entry.variant == "differentiable"
        self.shapes = MATRICES if entry.op == "Muon" else SHAPES
        wider = tolerances.TOLERANCES.get(entry.op)
        if wider is not None and wider.dtypes and entry.dtype not in wider.dtypes:
            wider = None
        self.rtol, self.atol = (wider.rtol, wider.atol) if wider is not None else (None, None)

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        for name, options in spread(list(self.configurations()), self.most):
            result.samples += 1
            if "step" in checks:
                result.record("step", name, lambda o=options: self._step(o))
            if "state_dict" in checks:
                result.record("state_dict", name, lambda o=options: self._state_dict(o))
            for axis, function in self._axes_of(options):
                if axis in checks:
                    hooks.forget_programs()
                    result.record(axis, name, function)
        if "errors" in checks and self.entry.variant == "for-loop" and self.dtype is torch.float32:
            for error_input in self.info.optim_error_inputs_func("cpu", self.dtype):
                result.record("errors", error_input.optimizer_error_input.desc, lambda e=error_input: self._error(e))
            for options in CONTRADICTIONS if "fused" in self.info.supported_impls else ():
                result.record("errors", str(options), lambda o=options: self._contradiction(o))
        return result

    def configurations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Those of the database, with the ones for CUDA, in this implementation; number tensors also on the device."""
        flags = {form: form == self.entry.variant for form in self.info.supported_impls}
        for config in self.info.optim_inputs_func("cuda", self.dtype):
            options = {**config.kwargs, **flags}
            if options.get("capturable") and (self.entry.op, f"capturable {self.entry.variant}") in tolerances.SKIPPED:
                continue
            if options.get("fused") and self.dtype.is_complex:
                # PyTorch refuses complex parameters in every fused form, but a CPU has no capturable one to refuse.
                continue
            if self.info.step_requires_closure:
                # Nearer to the minimum, differences of rounding decide when it stops.
                options["max_iter"] = 3
            yield config.desc, options
            if any(isinstance(v, torch.Tensor) for v in options.values()):
                yield (
                    f"{config.desc}, on the device",
                    {k: v.to("tpu") if isinstance(v, torch.Tensor) else v for k, v in options.items()},
                )

    def _axes_of(self, options: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "again", lambda: self._courses(options, PLAIN, Course(seed=6), PLAIN)
        yield "offsets", lambda: self._courses(options, *(Course(turn=turn) for turn in (0, 1, 2, 0)))
        yield "numbers", lambda: self._courses(options, PLAIN, Course(other_numbers=True), PLAIN)
        yield "shared", lambda: self._courses(options, PLAIN, Course(in_one_storage=True), PLAIN)
        yield "subsets", lambda: self._courses(options, PLAIN, Course(absent=ABSENT), PLAIN)
        yield "threads", lambda: self._threads(options)

    def _courses(self, options: dict[str, Any], *courses: Course) -> None:
        for course in courses:
            with saying(str(course)):
                self._step(options, course)

    def _threads(self, options: dict[str, Any]) -> None:
        with saying("in two threads"):
            threads.at_once([functools.partial(self._step, options, c) for c in (PLAIN, Course(seed=6))])

    # --- the checks ----------------------------------------------------------------------------------------------

    def _step(self, options: dict[str, Any], course: Course = PLAIN) -> None:
        want: list[Any] = []
        error = raised(lambda: want.extend(self._trained("cpu", options, course)))
        if error is not None:
            check_same_exception(raised_by_device(lambda: self._trained("tpu", options, course)), error)
            return
        got = self._trained("tpu", options, course)
        self._same(got, want, lambda **moved: self._trained("cpu", options, course, wide=True, **moved))

    def _state_dict(self, options: dict[str, Any]) -> None:
        """What one side saved, the other loads and goes on with."""
        if raised(lambda: self._trained("cpu", options)) is not None or self.differentiable:
            return
        want = self._trained("cpu", options, then="cpu")
        for first, second in (("cpu", "tpu"), ("tpu", "cpu")):
            got = self._trained(first, options, then=second)
            self._same(got, want, lambda **moved: self._trained("cpu", options, wide=True, then="cpu", **moved))

    def _error(self, error_input: Any) -> None:
        config = error_input.optimizer_error_input

        def attempt(place: str) -> None:
            parameters = self.parameters(place) if config.params is None else _moved(config.params, place)
            with warnings.catch_warnings(action="error"):
                optimizer = self.info.optim_cls(parameters, **deepcopy(config.kwargs))
                if error_input.error_on is OptimizerErrorEnum.STEP_ERROR:
                    optimizer.step()

        want = raised(lambda: attempt("cpu"))
        if want is None:
            raise Mismatch("accepts", "the CPU accepts it")
        check_same_exception(raised_by_device(lambda: attempt("tpu")), want)

    def _contradiction(self, options: dict[str, Any]) -> None:
        want = raised(lambda: self.info.optim_cls(self.parameters("cpu"), **options))
        if want is None:
            raise Mismatch("accepts", "the CPU accepts it")
        check_same_exception(raised_by_device(lambda: self.info.optim_cls(self.parameters("tpu"), **options)), want)

    # --- what they share -----------------------------------------------------------------------------------------

    def parameters(self, place: str, wide: bool = False, course: Course = PLAIN) -> list[torch.Tensor]:
        """Parameters of a few shapes; the last one never gets a gradient."""
        generator = torch.Generator().manual_seed(3)
        values = [
            torch.randn(s, dtype=torch.float64, generator=generator).to(self.dtype) for s in (*self.shapes, (2, 2))
        ]
        values = widened(values, self.dtype) if wide else values
        return [torch.nn.Parameter(v) for v in course.placed(values, place)]

    def _trained(
        self,
        place: str,
        options: dict[str, Any],
        course: Course = PLAIN,
        *,
        wide: bool = False,
        then: str = "",
        moved_by: int | None = None,
    ) -> list[Any]:
        """Parameters and state after each step; the second half of the steps is made at `then`.

        Gradients come from the CPU's generator, so that what differs is the optimizer's. Where an optimizer wants to
        compute a loss itself, it does. With `moved_by`, parameters and gradients differ by what rounding hides.
        """
        leaves = self.parameters(place, wide, course)
        if moved_by is not None:
            moved(leaves, self.dtype, moved_by)
        parameters = [p.clone() for p in leaves] if self.differentiable else leaves
        optimizer = self._optimizer(parameters, place, options)
        generator = torch.Generator().manual_seed(course.seed)
        seen: list[Any] = []
        slopes = []
        first_numbers: list[dict[str, Any]] = []
        for step in range(STEPS):
            if then and step == STEPS // 2:
                parameters, optimizer = self._continued(parameters, optimizer, then, options)
            course.set_numbers(optimizer, step, first_numbers)
            drawn = []
            for p in parameters[:-1]:
                slope = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(self.dtype).to(p.dtype)
                if moved_by is not None:
                    moved(slope, self.dtype, moved_by + step)
                drawn.append(slope)
            own = course.placed(drawn, parameters[0].device.type)
            for i, (p, slope) in enumerate(zip(parameters[:-1], own, strict=True)):
                p.grad = slope.requires_grad_(self.differentiable) if course.has_gradient(step, i) else None
                slopes += [p.grad] if p.grad is not None else []
            optimizer.step(_loss(parameters, optimizer) if self.info.step_requires_closure else None)
            seen.append(_on_host((parameters, _state(optimizer))))
        if self.differentiable:
            total = torch.stack([p.abs().square().sum() for p in parameters]).sum()
            seen.append(_on_host(torch.autograd.grad(total, [*leaves, *slopes], allow_unused=True)))
        return seen

    def _optimizer(self, parameters: list[torch.Tensor], place: str, options: dict[str, Any]) -> torch.optim.Optimizer:
        if place == "cpu":
            options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            if options.get("capturable"):
                # The CPU has no capturable form; what it computes is what the plain loop does.
                options |= {"capturable": False} | {f: False for f in ("foreach", "fused") if f in options}
        return self.info.optim_cls(parameters, **deepcopy(options))

    def _continued(
        self, parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, place: str, options: dict[str, Any]
    ) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        """The same at another place, through a saved file."""
        file = io.BytesIO()
        torch.save((parameters, optimizer.state_dict()), file)
        file.seek(0)
        saved, state = torch.load(file, map_location=place)
        moved = [torch.nn.Parameter(p.detach()) for p in saved]
        other = self._optimizer(moved, place, options)
        # Which form to take is the new optimizer's choice, not the file's.
        for group, own in zip(state["param_groups"], other.param_groups, strict=True):
            group.update({k: own[k] for k in ("capturable", "foreach", "fused") if k in own})
        other.load_state_dict(state)
        return moved, other

    def _same(self, got: list[Any], want: list[Any], wide: Callable[..., Any]) -> None:
        try:
            assert_same(got, want, rtol=self.rtol, atol=self.atol)
        except Mismatch as mismatch:
            if mismatch.kind != "values" or not rounds_elsewhere(self.dtype):
                raise
            # Capturable forms on lists round once more than the plain loop, which stands for them on the CPU.
            factor, _ = tolerances.FACTORS.get(f"{self.entry.op} {self.entry.variant}", (4, ""))
            nearby = [wide(moved_by=seed) for seed in range(8)] if self.dtype in HALF else []
            check_as_accurate(got, want, wide(), factor=factor, nearby=nearby)


def _loss(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.stack([(p * (i + 1) - 1).abs().pow(3).sum() for i, p in enumerate(parameters[:-1])]).sum()
        total.backward()
        return total

    return closure


def _state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Everything the optimizer keeps, numbers as tensors: which of the two it is depends on the form."""
    state = optimizer.state_dict()["state"]
    return {i: {k: _number(v) for k, v in sorted(kept.items())} for i, kept in state.items()}


def _number(value: Any) -> Any:
    return torch.tensor(float(value)) if isinstance(value, (int, float)) else value


def _on_host(nest: Any) -> Any:
    """What the tensors hold now, as nothing changes later."""
    return tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v, nest)


def _moved(nest: Any, place: str) -> Any:
    """Copies at a place, one for each tensor however often it occurs."""
    copies: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copy = torch.nn.Parameter(leaf.detach().to(place, copy=True))
            copy.grad = leaf.grad.to(place) if leaf.grad is not None else None
            copies[id(leaf)] = copy
        return copies[id(leaf)]

    return tree_map(move, nest)
