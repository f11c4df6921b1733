"""Forked children: XLA's threads do not survive a fork, so waiting for a result in the child would hang."""

from __future__ import annotations

import os
import sys

from torch_tpu.eager import hooks

in_bad_fork = False


def check() -> None:
    """Raises in a process that was forked after its parent had started the device."""
    if in_bad_fork:
        raise RuntimeError(
            "Cannot re-initialize TPU in forked subprocess. To use TPU with multiprocessing, "
            "you must use the 'spawn' start method"
        )


def _after_fork_in_child() -> None:
    global in_bad_fork
    # Asked of `sys.modules`: a child of a parent that never used the device must not import the runtime here.
    client = sys.modules.get("torch_tpu.runtime.client")
    if client is not None and client.is_initialised():
        in_bad_fork = True
        hooks.forked = check


def install() -> None:
    os.register_at_fork(after_in_child=_after_fork_in_child)
