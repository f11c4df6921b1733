"""Plans: how much memory and time a program takes on a TPU, from the TPU compiler's own answers. No TPU is needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch_tpu.planner.figures import Plan
from torch_tpu.runtime.platform import topology_asked_for

if TYPE_CHECKING:
    from torch_tpu.runtime.topology import TopologyClient

__all__ = ["NothingToPlanError", "Plan", "plan", "plan_script"]

Progress = Callable[[int, int], None]


class NothingToPlanError(RuntimeError):
    """The planned program has no step on the device."""


def _silent(done: int, count: int) -> None:
    pass


def plan(
    fn: Callable[..., Any],
    *args: Any,
    target: str,
    steps: int = 3,
    tokens: int = 0,
    samples: int = 0,
    progress: Progress = _silent,
) -> Plan:
    """Plans repeated calls of a function, each of which is a step. Nothing runs; values that it reads are placeholders.

    Args:
        fn: a step of training or inference on the device "tpu". Modules and optimizers may be among `args`.
        target: the TPUs, such as "v5e:2x2"; `torch-tpu topologies` lists them. One of their devices is planned.
        steps: how often it is called; the last time counts.
        tokens, samples: their number in a step, if it can't be read from the batch.
        progress: called with how many programs have been compiled and how many there are.

    Raises:
        ValueError: if the target is not a topology.
        NothingToPlanError: if `fn` does not use the device "tpu".
        RuntimeError: if the device has been started on another platform. Tensors that `fn` and `args` hold must be
            made after TORCH_TPU_PLATFORM was set to the target, or inside of `fn`.
    """
    from torch_tpu.planner import script

    _use(target)
    record, window = script.run_function(fn, args, steps)
    return _planned(record, window, target, tokens, samples, progress)


def plan_script(
    path: Path,
    arguments: Sequence[str],
    target: str,
    steps: int = 3,
    tokens: int = 0,
    samples: int = 0,
    progress: Progress = _silent,
    save: Path | None = None,
) -> Plan:
    """Plans a script, run in this process as `python PATH ARGUMENTS` would.

    Args:
        save: a folder for the executables of every program, in the format of the disk cache.
        Others are those of `plan`.
    """
    from torch_tpu.planner import script

    _use(target)
    record, window = script.run_script(path, arguments, steps)
    return _planned(record, window, target, tokens, samples, progress, save)


def _use(target: str) -> None:
    from torch_tpu.runtime.process_client import client, is_initialised

    if not topology_asked_for({"TORCH_TPU_PLATFORM": target}):
        raise ValueError(f"{target!r} is not a TPU topology. `torch-tpu topologies` lists them.")
    if not is_initialised():
        os.environ["TORCH_TPU_PLATFORM"] = target
        from torch_tpu.eager import mode

        if "TORCH_TPU_DEFER_AND_FUSE" not in os.environ:
            mode.use_eager_mode(mode.EagerMode.DEFER_AND_FUSE)
    started = getattr(client(), "topology", None)
    if started != target:
        raise RuntimeError(
            f"The device has been started {f'for {started}' if started else 'on ' + client().platform_name}, so "
            f"it can't plan for {target}. Set TORCH_TPU_PLATFORM={target} before the first tensor is made."
        )


def _planned(
    record: Any, window: Any, target: str, tokens: int, samples: int, progress: Progress, save: Path | None = None
) -> Plan:
    from torch_tpu.planner import advice, artefacts, compiling, machine, measure
    from torch_tpu.runtime.process_client import client

    device = machine.machine(target)
    programs = [run.program for run in record.runs[window.begin : window.end]]
    if not programs:
        raise NothingToPlanError("nothing ran on the device 'tpu', so there is nothing to plan")
    answers = compiling.analyse(programs, progress)
    made = measure.measure(record, window, answers, device, target, tokens, samples)
    if save is not None:
        artefacts.save(save, [run.program for run in record.runs], cast("TopologyClient", client()), progress)
    return dataclasses.replace(made, advice=list(advice.advice(made)))
