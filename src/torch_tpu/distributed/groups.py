"""The groups of this process: what ends with them, and with the process."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import Any

from torch_tpu import hooks
from torch_tpu.distributed import channel

_is_open = False


def opened(group: Any) -> None:
    """A group has been made."""
    global _is_open
    if not _is_open:
        _is_open = True
        hooks.end_collectives = channel.end_all
        atexit.register(_before_exit)


def _before_exit() -> None:
    """Other ranks may still read what this one sends, though it has nothing more to do."""
    if not hasattr(sys, "last_type"):  # after an error of the user's nobody should wait
        with contextlib.suppress(RuntimeError):
            channel.end_all()
