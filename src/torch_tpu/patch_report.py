"""Every patch and its state, for `torch-tpu doctor` and the tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

# These declare patches and are not imported when the device is registered.
_DECLARE_LATER = (
    "torch_tpu.ops.convolution_shapes",
    "torch_tpu.eager.deferred.thread_graphs",
    "torch_tpu.planner.script",
)


def patches() -> list[Any]:
    """Every patch. Imports the runtime, if it can be imported."""
    import torch_tpu  # noqa: F401  (registers the device)
    from torch_tpu.patching import patch_registry

    for module in _DECLARE_LATER:
        try:
            importlib.import_module(module)
        except (ImportError, RuntimeError):
            continue  # without jaxlib there is no device; `doctor` says so itself
    return patch_registry.patches


def report() -> list[dict[str, Any]]:
    """Each patch as name, feature, state, reason, note and whether it is required.

    Imports the modules after whose import patches are made, so that those are made or found not to fit. Patches that
    wait for something else are looked at: what does not fit counts as off.
    """
    from torch_tpu.patching.patch_registry import Moment, State

    rows = []
    for patch in patches():
        note, problem = "", ""
        if patch.after and importlib.util.find_spec(patch.after.partition(".")[0]) is None:
            note = f"{patch.package} is not installed"
        elif patch.after:
            try:
                importlib.import_module(patch.after)
            except Exception as error:
                note = f"{patch.after} can't be imported ({type(error).__name__}: {error})"
        elif patch.state is State.NOT_NEEDED_YET:
            problem = patch.problem() if patch.moment in (Moment.CALL, Moment.FIRST_USE) else ""
        rows.append(
            {
                "name": patch.name,
                "feature": patch.feature,
                "state": State.OFF.value if problem else patch.state.value,
                "reason": patch.explain(problem) if problem else patch.reason,
                "note": note,
                "required": patch.required,
            }
        )
    return rows
