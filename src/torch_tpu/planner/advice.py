"""Sentences that follow from the figures of a plan: each says what was found, where, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch_tpu.planner.figures import Plan
from torch_tpu.planner.machine import machine
from torch_tpu.planner.recorder import OTHER, PARAMETER, STATE
from torch_tpu.runtime.generations import BY_TOPOLOGY

LANES = 128
# Shares below these are not worth a sentence.
PADDING_SHARE = 0.05
TIME_SHARE = 0.05


def advice(plan: Plan) -> Iterator[str]:
    """What to do, the gravest first."""
    if not plan.fits and plan.memory.peak > plan.memory.limit:
        yield from _too_large(plan)
    for wait in (w for w in plan.waits if w.fallback):
        yield (
            f"An operator at {wait.line} runs on the CPU: {wait.count:g} round trips a step, {_mib(wait.bytes)} to the "
            "host. `torch_tpu.metrics.report()` names it. Use another operator to keep the work on the device."
        )
    for wait in (w for w in plan.waits if not w.fallback):
        yield (
            f"The host waits for the device {wait.count:g}× a step at {wait.line}. Read less often, or one step later, "
            "so that the device need not wait."
        )
    if plan.recompiled:
        yield (
            f"{plan.recompiled} of {len(plan.programs)} programs of the last step were new: each such step compiles. "
            "Keep shapes the same (pad batches and sequences); `torch_tpu.metrics.report()` gives the reasons."
        )
    padding = plan.padding
    wasted = sum(padding.values())
    if wasted > PADDING_SHARE * max(plan.memory.peak, 1):
        worst = max(padding, key=lambda name: padding[name])
        yield (
            f"{_mib(wasted)} of the peak is padding, {_mib(padding[worst])} of it in {worst}. The compiler pads last "
            f"dimensions to multiples of {LANES}, those before them to multiples of 8 (16 in bfloat16)."
        )
    for line, seconds in sorted(plan.float32.items(), key=lambda item: -item[1])[:3]:
        if seconds > TIME_SHARE * plan.seconds:
            yield (
                f"Matrix products in float32 at {line} take {seconds / plan.seconds:.0%} of the step: bfloat16 "
                '(torch.autocast("tpu") or a bfloat16 model) takes a third of the time or less.'
            )
    if plan.bound == "HBM" and plan.utilisation < 0.3 and plan.seconds:
        yield (
            f"Memory traffic, not arithmetic, bounds the step ({plan.utilisation:.0%} of peak FLOP/s): a larger batch "
            "uses each parameter more often for the same traffic."
        )


def _too_large(plan: Plan) -> Iterator[str]:
    parts = plan.memory.parts
    largest = max(parts, key=lambda name: parts[name])
    what = {
        OTHER: "torch.utils.checkpoint keeps fewer of them, a smaller batch makes them smaller (`--find-max batch=…`)",
        "temporaries": "a smaller batch or sequence makes them smaller (`--find-max batch=…`)",
        PARAMETER: "bfloat16 halves them; more devices can share them",
        STATE: "an optimizer with less state, or in bfloat16, takes less; more devices can share it",
    }.get(largest, "a smaller batch takes less")
    yield f"{largest.capitalize()} take most of the memory ({_mib(parts[largest])}): {what}."
    larger = [name for name in BY_TOPOLOGY if machine(name).usable_bytes >= plan.memory.peak]
    if larger:
        smallest = min(larger, key=lambda name: machine(name).usable_bytes)
        yield f"One device of {smallest} would hold it ({machine(smallest).usable_bytes / 2**30:.2f} GiB)."
    else:
        most = max(machine(name).usable_bytes for name in BY_TOPOLOGY)
        yield f"No single device holds it: at least {math.ceil(plan.memory.peak / most)} of the largest are needed."


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
