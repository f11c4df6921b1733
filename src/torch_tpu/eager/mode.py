"""When recorded operators run: at once and asynchronously (strict), at once and waited for (debug), or fused later."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator

from torch_tpu import hooks
from torch_tpu.runtime.platform import topology_asked_for


class EagerMode(enum.Enum):
    """The public names of TorchTPU."""

    DEFER_AND_FUSE = "fused"
    DEFER_NEVER = "strict"
    DEFER_NEVER_AND_LAUNCH_BLOCKING = "debug"


def _flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def _from_environment() -> EagerMode:
    if _flag("TORCH_TPU_LAUNCH_BLOCKING"):
        return EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    # libtpu takes a second or two for any program, so one for each operator would be too many.
    if _flag("TORCH_TPU_DEFER_AND_FUSE") or ("TORCH_TPU_DEFER_AND_FUSE" not in os.environ and topology_asked_for()):
        return EagerMode.DEFER_AND_FUSE
    return EagerMode.DEFER_NEVER


_mode = _from_environment()
# Read for every operator; process-wide, because backward runs in threads of its own.
blocking = _mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
fused = _mode is EagerMode.DEFER_AND_FUSE


def get_eager_mode() -> EagerMode:
    return _mode


def use_eager_mode(mode: EagerMode) -> None:
    """Sets the process-wide mode."""
    global _mode, blocking, fused
    if not isinstance(mode, EagerMode):
        raise TypeError(f"expected a torch.tpu.EagerMode, got {mode!r}")
    if fused and hooks.flush is not None:
        hooks.flush("mode")
    _mode = mode
    blocking = mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    fused = mode is EagerMode.DEFER_AND_FUSE


@contextlib.contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Runs a block in another mode."""
    before = _mode
    use_eager_mode(mode)
    try:
        yield
    finally:
        use_eager_mode(before)
