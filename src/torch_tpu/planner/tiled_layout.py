"""How the compiler lays values out in memory, read from the shapes of its HLO: `bf16[8,100]{1,0:T(8,128)(2,1)}`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([^)]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"[a-z]+(\d+)")
# The memory space that has no mark.
HBM = 0


@dataclass(frozen=True)
class Shape:
    """An array: element type in HLO's words, sizes, bytes without and with padding, and which memory it lies in."""

    dtype: str
    sizes: tuple[int, ...]
    logical_bytes: int
    bytes: int
    space: int


def shapes(text: str) -> Iterator[Shape]:
    """Every array in the text of a shape: one, or the entries of a tuple."""
    for dtype, sizes, order, layout in _SHAPE.findall(text):
        if dtype != "token":
            yield _shape(dtype, _numbers(sizes), _numbers(order), layout)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _shape(dtype: str, sizes: tuple[int, ...], minor_to_major: tuple[int, ...], layout: str) -> Shape:
    found = _BITS.match(dtype)
    bits = int(found[1]) if found else 8
    physical = [sizes[d] for d in reversed(minor_to_major)] if len(minor_to_major) == len(sizes) else list(sizes)
    tile = _TILE.search(layout)
    if tile is not None:
        sides = [int(side) for side in tile[1].split(",") if side.isdigit()]
        physical = [1] * (len(sides) - len(physical)) + physical
        for k, side in enumerate(reversed(sides), 1):
            physical[-k] = -(-physical[-k] // side) * side
    space = _SPACE.search(layout)
    return Shape(
        dtype,
        sizes,
        math.prod(sizes) * bits // 8,
        math.prod(physical) * bits // 8,
        int(space[1]) if space else HBM,
    )
