"""The deferred graph of each thread, and when all of them run."""

from __future__ import annotations

import threading
import weakref

from torch_tpu import hooks
from torch_tpu.eager import mode
from torch_tpu.eager.deferred import runtime_checks
from torch_tpu.eager.deferred.deferred_graph import DeferredGraph
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function
from torch_tpu.patching.patch_registry import Moment, optional

graphs: weakref.WeakSet[DeferredGraph] = weakref.WeakSet()
threads = threading.local()


def current() -> DeferredGraph:
    """The graph of this thread."""
    try:
        found: DeferredGraph = threads.graph
    except AttributeError:
        found = threads.graph = DeferredGraph()
        graphs.add(found)
    return found


def flush_all(cause: str) -> None:
    """Runs what every thread has recorded, and looks at its conditions."""
    for found in list(graphs):
        found.flush(cause)
    runtime_checks.settle()


@optional(
    "optimizer steps",
    "fused eager runs what is recorded before and after an optimizer's step",
    function("torch.optim.optimizer:register_optimizer_step_pre_hook", "hook"),
    function("torch.optim.optimizer:register_optimizer_step_post_hook", "hook"),
    moment=Moment.CALL,
)
def around_optimizer_steps(changes: Changes) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    changes.on_undo(register_optimizer_step_pre_hook(_before_optimizer_step).remove)
    changes.on_undo(register_optimizer_step_post_hook(_after_optimizer_step).remove)


def _before_optimizer_step(*_: object) -> None:
    # Gradients are kept anyway. Behind them the steps of equal parameters are one program, which writes in place what a
    # program that has backward in it would still have to read.
    if mode.fused:
        current().flush("optimizer step")


def _after_optimizer_step(*_: object) -> None:
    # The gradients are dropped next: what reads them should not wait for the next forward pass.
    if mode.fused:
        current().flush("optimizer step")


hooks.flush = flush_all
around_optimizer_steps.apply()
