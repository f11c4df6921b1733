"""The one place where a lower layer calls a higher one: functions that higher layers provide.

Each is set by the layer that has it, when it is imported or when the device is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _no_generator(generator: Any, count: int) -> tuple[int, int]:
    raise RuntimeError("the device's random generator is not set up; `import torch_tpu` first")


def _no_indices(index: int | None) -> int:
    raise RuntimeError("the device is not set up; `import torch_tpu` first")


def _no_world() -> Any:
    raise NotImplementedError("no process group of the tpu device connects this process with others")


def _never() -> bool:
    return False


# From `device.generator`: take(generator or None, count) -> (seed, offset) advances the generator by `count` words.
take_random: Callable[[Any, int], tuple[int, int]] = _no_generator
# From `device.device_index`: raises for an index other than 0 that does not name this process's device either.
check_index: Callable[[int | None], int] = _no_indices
# From `device.fork`, in a forked child: raises the error that tells the user to use spawn.
forked: Callable[[], None] | None = None
# From `eager.deferred`: runs what has been recorded and not yet run, and says why; None where nothing ever was.
flush: Callable[[str], None] | None = None
# From `distributed`: waits until the collectives that this process has begun have ended.
end_collectives: Callable[[], None] | None = None
# From `eager.deferred`: looks at run-time checks before the host reads a value.
before_reading: Callable[[], None] | None = None
# From `eager.program`: whether a program is being traced in this thread.
traces: Callable[[], bool] = _never
# From who looks on for a while (`torch_tpu.compile.debug`): told of each program that a compiled graph gets.
graph_program_made: Callable[[Any, Any], None] | None = None
# From `distributed`: makes this process's client one of a world of processes, for the first program that communicates.
join_world: Callable[[], Any] = _no_world
# Each drops the compiled programs that it keeps for later.
_keepers: list[Callable[[], None]] = []


def keeps_programs(forget: Callable[[], None]) -> Callable[[], None]:
    """Adds a function that drops compiled programs kept for later."""
    _keepers.append(forget)
    return forget


def forget_programs() -> None:
    """Drops every compiled program that is kept for later: so many are loaded that more could crash the process."""
    for forget in _keepers:
        forget()


def check_device(device: torch.device | None) -> None:
    """Raises for an index this process has no device for."""
    if device is not None and device.index:
        check_index(device.index)
