"""Where plans are kept: by the signature of a call, and once more by the shorter key of the fast path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tpu import delayed, hooks, metrics
from torch_tpu.eager import mode
from torch_tpu.eager.program import recompile_reason, stored_plans
from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Call, Plan
from torch_tpu.metrics import programs
from torch_tpu.recent import Recent
from torch_tpu.runtime.client import client_errors
from torch_tpu.tensor.errors import check_fits

if TYPE_CHECKING:
    from torch_tpu.eager.program import plan_tracing
else:
    # Plans from the disk need neither MLIR nor the tracer.
    plan_tracing = delayed.module("torch_tpu.eager.program.plan_tracing", globals(), "plan_tracing")

# Plan or Unsupported by signature. Forgetting a plan also frees its executable.
MOST_PLANS = 16384
plans: Recent[Any, Any] = Recent(MOST_PLANS)
# Those of simple calls once more, by shorter keys (`eager.dispatch.fast_path`).
fast_path_plans: Recent[Any, Any] = Recent(MOST_PLANS)
_making = threading.RLock()
_counters = metrics.counts.counters


@dataclass(frozen=True)
class Unsupported:
    """In place of a plan: a call that no program can express, and why."""

    reason: str


class ForOffsets:
    """In place of a plan: calls that need another program where a view starts at another offset."""

    __slots__ = ()

    @staticmethod
    def key(key: tuple[Any, ...], sig: CallSignature) -> tuple[Any, ...]:
        """The key of a call's plan."""
        return (*key, *(sig.starts[i].offset for i in sorted(sig.starts)))


def known_plan(key: tuple[Any, ...], sig: CallSignature) -> Any:
    """The plan of a signature that was met before, or what stands in its place; None if it was not."""
    plan = plans.get(key) or plans.find(key)
    if plan.__class__ is ForOffsets:
        key = ForOffsets.key(key, sig)
        plan = plans.get(key) or plans.find(key)
    if plan is not None:
        _counters["compile_cache_hit"] += 1
    return plan


def keep(key: tuple[Any, ...], instead: Any) -> Any:
    """Puts something in place of the plan of a signature until its plan is made."""
    with _making:
        return plans.keep(key, instead)


def find_plan(
    key: tuple[Any, ...], sig: CallSignature, make: Callable[[], Call], judge: Callable[[], None] | None = None
) -> Plan | Unsupported:
    """The plan of a signature, made at its first call.

    Args:
        judge: asks the CPU whether it takes such a call: raises for numbers that it refuses, and warns as it warns. A
            trace does so itself, a stored plan does not.
    """
    with _making:
        plan: Any = plans.find(key)
        of_offsets = ForOffsets.key(key, sig)
        if isinstance(plan, ForOffsets):
            plan = plans.find(of_offsets)
        if isinstance(plan, (Plan, Unsupported)):
            return plan
        try:
            call = make()
            plan = stored_plans.find(call)
            if plan is None:
                plan = plan_tracing.make_plan(call)
                stored_plans.keep(call, plan)
            elif judge is not None:
                judge()
            check_fits(plan.nbytes)
            if mode.fused and not plan.ranks:
                plan.call = call
            else:
                plan.compiled()
        except NotImplementedError as error:
            plan = Unsupported(str(error))
        except client_errors() as error:
            plan = Unsupported(why_refused(error))
        else:
            owner = key[0]
            programs.made(owner.kind, owner.title, recompile_reason.fields(call, owner.argument_names), plan.number)
            if plan.for_offsets and sig.starts:
                plans.keep(key, ForOffsets())
                key = of_offsets
        plans.keep(key, plan)
        return plan


def refuse(plan: Plan, reason: str) -> None:
    """Puts the reason in place of a plan for which the compiler turns out to have no code."""
    plans.replace(plan, Unsupported(reason))
    fast_path_plans.replace(plan, None)


@hooks.keeps_programs
def clear() -> None:
    """Forgets every plan."""
    plans.clear()
    fast_path_plans.clear()


def why_refused(error: Exception) -> str:
    """Why a program can't be: the compiler refuses it, such as for a dtype the platform lacks."""
    return f"the compiler refused it: {str(error).splitlines()[0]}"
