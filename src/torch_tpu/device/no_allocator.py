"""Functions of `torch.cuda.memory` about PyTorch's allocator. PJRT allocates here: each raises an error with advice.

They are found under their names in `torch.tpu.memory`, but are no part of its public names: programs ask with `hasattr`
for what a device can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_COUNTS = "torch.tpu.memory_summary() and torch.tpu.memory_stats() have the counts"
_FRACTION = "PJRT allocates memory as it needs it; a limit below the device's memory can't be set"
_PJRT = "PJRT allocates the device's memory; other allocators and memory pools can't be used"

# What a call of each says.
_REASONS = {
    "_record_memory_history": f"no history of allocations is recorded; {_COUNTS}; `torch-tpu plan` shows memory",
    "_snapshot": f"no history of allocations is recorded, so there is no snapshot; {_COUNTS}",
    "_dump_snapshot": f"no history of allocations is recorded, so there is no snapshot; {_COUNTS}",
    "memory_snapshot": f"PJRT does not report how its memory is divided; {_COUNTS}",
    "set_per_process_memory_fraction": _FRACTION,
    "caching_allocator_alloc": f"{_PJRT}; torch.empty(size, device='tpu') allocates memory",
    "caching_allocator_delete": f"{_PJRT}; memory is freed when the last tensor that uses it is deleted",
    "change_current_allocator": _PJRT,
    "MemPool": _PJRT,
    "use_mem_pool": _PJRT,
}


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torch.tpu.memory.{name}: {reason}.")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotImplementedError: {reason}."
    return refuse


REFUSALS = {name: _refusal(name, reason) for name, reason in _REASONS.items()}


def record_memory_history(enabled: str | None = "all", *args: Any, **kwargs: Any) -> None:
    """Raises NotImplementedError, unless it is asked to stop recording."""
    if enabled is not None:
        REFUSALS["_record_memory_history"]()
