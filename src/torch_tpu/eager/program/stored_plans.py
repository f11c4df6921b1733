"""Plans on disk, beside the executables: what an earlier process lowered, this one finds by its description.

Only calls with an `identity` are kept: those of compiled graphs and of operators. A plan from the disk needs neither
the operator's lowering nor MLIR, nor what PyTorch's meta kernels import: sympy alone takes longer than jaxlib.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.eager.program import plan_bytes
from torch_tpu.eager.program.plan import Call, Plan, Slot, data_dtype
from torch_tpu.ops.tracing import uninitialised
from torch_tpu.runtime import fingerprint
from torch_tpu.runtime.disk_cache import DiskCache
from torch_tpu.runtime.process_client import client

# Arguments that say all of themselves.
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (Slot, bool, int, float, complex, str, type(None), *_KINDS)

# Off in tests: a plan from an earlier run would hide the lowering that a test looks at.
keeps_operators = True


def find(call: Call) -> Plan | None:
    """The plan of an equal call in an earlier process."""
    cache, key = _place(call)
    if cache is None:
        return None
    content = cache.read(key)
    if content is None:
        return None
    try:
        with metrics.timed("disk_cache_seconds"):
            plan = plan_bytes.load(content, call)
    except plan_bytes.Damaged as error:
        cache.reject(key, f"can't be read ({error})")
        return None
    metrics.count("program")
    metrics.count("stored_plan")
    return plan


def keep(call: Call, plan: Plan) -> None:
    """Writes a plan for later processes."""
    cache, key = _place(call)
    if cache is not None:
        with contextlib.suppress(plan_bytes.Unstorable):
            cache.write(key, plan_bytes.dump(plan))


def _place(call: Call) -> tuple[DiskCache | None, str]:
    """The cache and the key of a call in it; no cache where the call is not to be kept."""
    cache = client().disk_cache
    # Programs that name their operators bear lines of the user's script, which change without the graph.
    if (
        cache is None
        or not call.identity
        or not (keeps_operators or call.func is None)
        or client().names_operators
        or not _is_plain([*call.args, *call.kwargs.values()])
    ):
        return None, ""
    description: list[Any] = [
        call.identity,
        call.name,
        call.args,
        call.kwargs,
        call.inputs,
        [data_dtype(value, call.wide) for value in call.data],
        call.hosts,
        call.wide,
        call.checks,
        call.guarded,
        torch._C._get_float32_matmul_precision(),
        torch.get_default_dtype(),
        uninitialised.is_filled(),
        torch.__version__,
        fingerprint.own_sources(),
    ]
    return cache, fingerprint.of_program(client().fingerprint, repr(description).encode(), [("kind", "plan")])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
