"""Functions of `torch.cuda.memory` about an allocator of PyTorch's. PJRT allocates here: each says what serves instead.

They are found under their names in `torch.tpu.memory`, but are no part of its public names: programs ask with `hasattr`
for what a device can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_COUNTS = "torch.tpu.memory_summary() and torch.tpu.memory_stats() have the counts"
_FRACTION = "PJRT takes memory as it needs it, and can't be held to a part of the device's"
_PJRT = "PJRT allocates the device's memory, and takes no allocator or pool of another kind"

# What a call of each says.
_REASONS = {
    "_record_memory_history": f"no history of allocations is recorded; {_COUNTS}; `torch-tpu plan` has that of a step",
    "_snapshot": f"no history of allocations is recorded, of which a snapshot could be made; {_COUNTS}",
    "_dump_snapshot": f"no history of allocations is recorded, of which a snapshot could be made; {_COUNTS}",
    "memory_snapshot": f"PJRT does not say how its memory is divided; {_COUNTS}",
    "set_per_process_memory_fraction": _FRACTION,
    "caching_allocator_alloc": f"{_PJRT}; torch.empty(size, device='tpu') makes memory",
    "caching_allocator_delete": f"{_PJRT}; memory is freed with the last tensor over it",
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
