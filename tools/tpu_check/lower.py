"""Lowers an entry's samples for TPUs: every program they are made of, forward and backward, and what has none.

The samples run on XLA:CPU in fused mode, where a program whose results nobody reads is made but neither compiled nor
run. Beside each program the one for TPUs is made. So values that decide what comes next are right, and cost little.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from tools.conformance.database import Entry
from tools.conformance.modules import ModuleRun
from tools.conformance.operators import OperatorRun
from tools.conformance.optimizers import OptimizerRun
from tools.samples import spread, spread_of_operator
from torch_tpu import hooks
from torch_tpu.eager.deferred import deferred_graph, runtime_checks, thread_graphs
from torch_tpu.eager.mode import EagerMode, set_eager_mode
from torch_tpu.eager.program import plan, plan_tracing, stored_plans
from torch_tpu.runtime.fingerprint import bytecode

OPTIMIZER_STEPS = 2
# Before others stand in its place.
_trace = plan_tracing.make_plan


@dataclass
class Lowered:
    """What an entry became.

    Attributes:
        samples: how many were lowered.
        programs: the digests of its programs.
        fallbacks: ATen operators that no program expresses on a TPU, with the reason. They run on the CPU.
        failures: what a lowering raised for TPUs though it works for XLA:CPU.
    """

    samples: int = 0
    programs: dict[str, str] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run(entry: Entry, *, samples: int, folder: Path) -> dict[str, Any]:
    """Lowers an entry; writes each program as MLIR bytecode to a file of `folder` that its digest names.

    Args:
        samples: at most so many, spread over all of them.

    Returns:
        A `Lowered` as a dict.
    """
    os.environ["TORCH_TPU_PLATFORM"] = "cpu"
    hooks.forget_programs()  # what has a plan is not lowered again
    lowered = Lowered()
    with warnings.catch_warnings(action="ignore"), _recording(lowered, folder):
        for call in CALLS[entry.kind](entry, samples):
            # What the CPU refuses, or has no gradient for, is no matter of TPUs.
            with contextlib.suppress(Exception), _recorded_apart():
                call()
                lowered.samples += 1
    return asdict(lowered)


@contextlib.contextmanager
def _recording(lowered: Lowered, folder: Path) -> Iterator[None]:
    def make_plan(call: plan.Call) -> plan.Plan:
        try:
            made = _trace(call, "tpu")
        except NotImplementedError as error:
            lowered.fallbacks[call.name] = str(error)
        except Exception as error:
            if _works(call):
                lowered.failures.append(f"{call.name}: {type(error).__name__}: {error}"[:600])
        else:
            digest = digest_of(made.module)
            lowered.programs[digest] = call.name
            file = folder / digest
            if not file.exists():
                partial = file.with_suffix(f".{os.getpid()}")
                partial.write_bytes(bytecode(made.module))
                partial.rename(file)
        return _trace(call)

    with (
        set_eager_mode(EagerMode.DEFER_AND_FUSE),
        # Otherwise backward would run what another thread has recorded.
        torch.autograd.set_multithreading_enabled(False),
        mock.patch.object(deferred_graph.DeferredGraph, "grown"),
        mock.patch.object(plan_tracing, "make_plan", make_plan),
        mock.patch.object(stored_plans, "keeps_operators", False),
    ):
        yield


@contextlib.contextmanager
def _recorded_apart() -> Iterator[None]:
    """What is recorded inside is dropped at the end."""
    with mock.patch.object(thread_graphs.threads, "graph", deferred_graph.DeferredGraph(), create=True):
        try:
            yield
        finally:
            runtime_checks.unread.clear()


def digest_of(module: Any) -> str:
    """The digest of a program (an `ir.Module`), whatever it is called and whichever lines it comes from."""
    text = re.sub(r'^module @("[^"]*"|\S+)', "module", str(module))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _works(call: plan.Call) -> bool:
    """Whether XLA:CPU has a program for a call."""
    try:
        _trace(call)
    except Exception:
        return False
    return True


# --- what there is to call ---------------------------------------------------------------------------------------

Calls = Iterator[Callable[[], object]]


def _operator(entry: Entry, samples: int) -> Calls:
    run = OperatorRun(entry, samples)
    found = list(run.info.sample_inputs("cpu", run.dtype, requires_grad=run.differentiable))
    for sample in spread_of_operator(found, samples):

        def call(sample: Any = sample) -> None:
            result = run.call(run.info.op, run.copies(sample)[1])
            if run.differentiable:
                _backward(sample.output_process_fn_grad(result))

        yield call


def _module(entry: Entry, samples: int) -> Calls:
    run = ModuleRun(entry, samples)
    for sample in spread(run.inputs(run.info.module_inputs_func), samples):

        def call(sample: Any = sample) -> None:
            _, module, _, inputs = run.copies(sample)
            _backward(run.call(module, inputs))

        yield call


def _optimizer(entry: Entry, samples: int) -> Calls:
    run = OptimizerRun(entry, samples)
    for _, options in spread(list(run.configurations()), samples):

        def call(options: dict[str, Any] = options) -> None:
            parameters = run.parameters("tpu")
            optimizer = run.info.optim_cls(
                [p.clone() for p in parameters] if run.differentiable else parameters, **options
            )
            for _ in range(OPTIMIZER_STEPS):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
                optimizer.step(lambda: sum(p.abs().sum() for p in parameters))

        yield call


CALLS: dict[str, Callable[[Entry, int], Calls]] = {
    "operator": _operator,
    "higher-order": _operator,
    "module": _module,
    "optimizer": _optimizer,
}


def _backward(results: Any) -> None:
    outputs = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
