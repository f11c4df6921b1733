"""The registry of drawers: functions that draw one step of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.random_programs.draft import Draft

Draw = Callable[[Draft], str]


@dataclass(frozen=True)
class Kind:
    """A drawer.

    Attributes:
        draw: returns a line; raises NoChoice where the draft has nothing fitting.
        weight: how often it is drawn, relative to the others.
        exact: its lines move or make values without rounding.
    """

    name: str
    draw: Draw
    weight: float
    exact: bool


KINDS: dict[str, Kind] = {}


def kind(weight: float = 1.0, *, exact: bool = False) -> Callable[[Draw], Draw]:
    """Registers a drawer under its function's name."""

    def register(draw: Draw) -> Draw:
        name = draw.__name__
        assert name not in KINDS, name
        KINDS[name] = Kind(name, draw, weight, exact)
        return draw

    return register
