"""Forked children: XLA's threads do not survive a fork, so waiting for a result in the child would hang."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from torch_tpu import hooks

in_bad_fork = False


def check() -> None:
    """Raises in a process that was forked after its parent had started the device."""
    if in_bad_fork:
        refuse()


def refuse() -> NoReturn:
    raise RuntimeError(
        "Cannot re-initialize TPU in forked subprocess. To use TPU with multiprocessing, "
        "you must use the 'spawn' start method"
    )


class _ForkedClient:
    """Takes the place of the parent's client in the child, and keeps that alive: its destructor would wait too."""

    def __init__(self, parents: Any) -> None:
        self.parents = parents

    def __getattr__(self, name: str) -> NoReturn:
        refuse()


def _after_fork_in_child() -> None:
    global in_bad_fork
    # Asked of `sys.modules`: a child of a parent that never used the device must not import the runtime here.
    client: Any = sys.modules.get("torch_tpu.runtime.process_client")
    if client is not None and client.is_initialised() and not in_bad_fork:
        in_bad_fork = True
        hooks.forked = refuse
        client._client = _ForkedClient(client._client)


def install() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no fork.
        os.register_at_fork(after_in_child=_after_fork_in_child)
