"""What the module under construction will run on: `module.build` says so, lowerings and `hlo.array` ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Target:
    """What the module under construction will run on, and what it needs there.

    Attributes:
        platform: PJRT's name of the platform, such as "cpu" or "tpu".
        lapack: whether it can call jaxlib's LAPACK: on XLA:CPU inside jaxlib alone, not on a plug-in's.
        custom_calls: names of the functions it calls that XLA must know.
        copies: names of the private functions that are copies of other modules, by module.
        functions: how many private functions it has.
        reads_precision: whether PyTorch's precision of float32 products had a say in it.
        collectives: its operations that communicate, each with the ranks of its group and the size of the world.
        ranks: those that run it together; none where it doesn't communicate.
    """

    platform: str
    lapack: bool
    custom_calls: set[str] = field(default_factory=set)
    copies: dict[Any, str] = field(default_factory=dict)
    functions: int = 0
    reads_precision: bool = False
    collectives: list[tuple[Any, tuple[int, ...], int]] = field(default_factory=list)
    ranks: tuple[int, ...] = ()

    def new_name(self) -> str:
        """A name for a private function."""
        self.functions += 1
        return f"f{self.functions - 1}"


# Of the modules being built, the innermost last; `module.building` guards it.
_targets: list[Target] = []
# The thread that builds them.
_builder: int | None = None


def target() -> Target:
    """The target of the module under construction."""
    return _targets[-1]


def builds_here() -> bool:
    """Whether a module is under construction in this thread."""
    return _builder == threading.get_ident()


@contextlib.contextmanager
def under_construction(target: Target) -> Iterator[None]:
    global _builder
    _targets.append(target)
    _builder = threading.get_ident()
    try:
        yield
    finally:
        _targets.pop()
        if not _targets:
            _builder = None
