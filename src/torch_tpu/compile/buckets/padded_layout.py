"""Where in a padded tensor its true elements are.

A dimension is a tuple of factors, the major one first, each an extent: a number or an expression of symbolic sizes.
Along a factor the true elements come first, as many as the extent's true value; the padded tensor has as many as its
padded value. A dimension `(s0,)` has its true elements in front; one that merges two, `(s0, s1)`, has those whose two
coordinates are both true. So views that merge dimensions and split them again are sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import sympy
import torch

Extent = Any  # int or sympy.Expr
Dim = tuple[Extent, ...]
Layout = tuple[Dim, ...]


class Unsound(NotImplementedError):
    """A graph whose result would depend on what is in the padding, or on padded sizes."""


def extent(size: Any, fixed: Mapping[sympy.Symbol, int] = MappingProxyType({})) -> Extent:
    """A size as FX notes it, or its expression, with numbers for some of its symbols."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if isinstance(expression, int):
        return expression
    return simplified(expression.xreplace({s: sympy.Integer(n) for s, n in fixed.items()}) if fixed else expression)


@lru_cache(maxsize=4096)
def simplified(expression: Extent) -> Extent:
    expression = sympy.expand(expression)
    return int(expression) if expression.is_Integer else expression


def is_static(size: Extent) -> bool:
    return isinstance(size, int)


def is_padded(dim: Dim) -> bool:
    return any(not isinstance(factor, int) for factor in dim)


def size_of(dim: Dim) -> Extent:
    """The extent of a whole dimension."""
    result: Extent = 1
    for factor in dim:
        result = simplified(result * factor)
    return result


def merged(factors: Iterable[Extent]) -> Dim:
    """Factors in their simplest form: rows of a fixed length after a symbolic factor are still in front."""
    result: list[Extent] = []
    for factor in factors:
        if factor == 1:
            continue
        if is_static(factor) and result:
            result[-1] = simplified(result[-1] * factor)
        else:
            result.append(factor)
    return tuple(result) or (1,)


@lru_cache(maxsize=4096)
def quotient(a: Extent, b: Extent) -> Extent | None:
    """`a / b` where that has no remainder for any sizes."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    numerator, denominator = sympy.cancel(sympy.sympify(a) / b).as_numer_denom()
    return simplified(numerator) if denominator == 1 else None


def viewed(layout: Layout, shape: Sequence[Extent]) -> Layout:
    """The layout after a view as `shape`.

    Raises:
        Unsound: where a dimension of the result would mix true elements and padding in another way.
    """
    rest = [f for f in merged(f for dim in layout for f in dim) if f != 1]
    result = []
    for size in shape:
        dim: list[Extent] = []
        while size != 1:
            if not rest or size == 0:
                raise Unsound(f"a view of {describe(layout)} as {list(shape)}")
            factor = rest.pop(0)
            larger = quotient(size, factor)
            if larger is not None:
                dim.append(factor)
                size = larger
                continue
            # Only rows of a fixed length can be cut off behind: in front they would begin at padded places.
            row = quotient(factor, size)
            if row is None or not is_static(row):
                raise Unsound(f"a view of {describe(layout)} as {list(shape)}")
            dim.append(size)
            rest.insert(0, row)
            size = 1
        result.append(merged(dim))
    if rest:
        raise Unsound(f"a view of {describe(layout)} as {list(shape)}")
    return tuple(result)


def broadcast(layouts: Sequence[Layout]) -> Layout:
    """The layout of an elementwise result.

    Raises:
        Unsound: where two operands have their true elements at different places.
    """
    rank = max(map(len, layouts), default=0)
    result: list[Dim] = [(1,)] * rank
    for layout in layouts:
        for d, dim in enumerate(layout, rank - len(layout)):
            if dim == (1,) or result[d] == dim:
                continue
            if result[d] != (1,):
                raise Unsound(f"operands with layouts {describe(layout)} and {describe(tuple(result))}")
            result[d] = dim
    return tuple(result)


def describe(layout: Layout) -> str:
    """Such as `[s0·s1, 16]`."""
    return f"[{', '.join('·'.join(map(str, dim)) for dim in layout)}]"
