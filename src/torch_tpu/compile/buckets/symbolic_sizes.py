"""Symbolic sizes of a graph: their true values at a call, and as numbers of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions

from torch_tpu.compile.buckets.padded_layout import Extent, Layout, Unsound, extent, is_static
from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array

_DIVISIONS = (functions.FloorDiv, functions.CleanDiv)
_REMAINDERS = (functions.Mod, functions.PythonMod)


class Symbols:
    """The symbols of a graph and where in its arguments their values are.

    Attributes:
        order: all of them.
        of_sizes: those that sizes of tensors consist of; the others are numbers only.
        unbound: expressions of values that only the program knows.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._bind(value, i, None)
            elif isinstance(value, torch.Tensor):
                for d, size in enumerate(value.shape):
                    self._bind(size, i, d)
        self.extents = frozenset(e for node in graph.graph.nodes for e in _extents(node) if not is_static(e))
        self.order = tuple(sorted(self._sources, key=str))
        free = {symbol for e in self.extents for symbol in e.free_symbols}
        self.of_sizes = tuple(s for s in self.order if s in free)
        self.unbound = tuple(sorted(map(str, free - set(self.order))))
        self._irregular = tuple(e for e in self.extents if not _grows(e))

    def _bind(self, size: Any, argument: int, dim: int | None) -> None:
        expression = size.node.expr if isinstance(size, torch.SymInt) else None
        if isinstance(expression, sympy.Symbol):
            self._sources.setdefault(expression, (argument, dim))

    def values(self, args: tuple[Any, ...]) -> dict[sympy.Symbol, int]:
        """The true value of each symbol at a call."""
        return {s: int(args[i]) if d is None else int(args[i].shape[d]) for s, (i, d) in self._sources.items()}

    def fit(self, true: Mapping[sympy.Symbol, int], padded: Mapping[sympy.Symbol, int]) -> bool:
        """Whether every size of the graph is at most its padded form: not so of differences."""
        return all(0 < evaluated(e, true) <= evaluated(e, padded) for e in self._irregular)


def _extents(node: Node) -> Iterable[Extent]:
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield from map(extent, value.shape)


def _grows(e: Any) -> bool:
    """Whether an expression is at least as large for larger symbols, and positive where it was."""
    if isinstance(e, int) or e.is_Symbol:
        return True
    if e.is_Add:
        return all(term.is_Integer or _grows(term) for term in e.args)
    if e.is_Integer:
        return bool(e >= 0)
    if isinstance(e, functions.FloorDiv):
        return bool(e.args[1].is_Integer) and _grows(e.args[0])
    return bool(e.is_Mul or e.is_Pow or isinstance(e, (functions.Max, functions.Min))) and all(map(_grows, e.args))


def evaluated(expression: Any, values: Mapping[sympy.Symbol, int]) -> Any:
    """An expression of symbols with these values, as Python's number."""
    return expression if isinstance(expression, int) else _evaluated(expression, tuple(values.items()))


@lru_cache(maxsize=2**16)
def _evaluated(expression: Any, values: tuple[tuple[sympy.Symbol, int], ...]) -> Any:
    result = expression.xreplace({s: sympy.Integer(v) for s, v in values})
    return int(result) if result.is_integer else float(result)


class Number:
    """A symbolic number among a node's arguments: a size in its padded form, or a number in its true form."""

    __slots__ = ("expression",)

    def __init__(self, expression: Any) -> None:
        self.expression = expression


class Sizes:
    """Sizes in a program: the padded ones are part of it, the true ones its inputs.

    Args:
        fixed: symbols that stand for one number.
    """

    def __init__(
        self,
        padded: Mapping[sympy.Symbol, int],
        true: Mapping[sympy.Symbol, Array],
        fixed: Mapping[sympy.Symbol, int],
    ) -> None:
        self._padded = padded
        self._true = true
        self._fixed = fixed
        self.padded = cache(self._evaluate)
        self.true = cache(self._compute)

    def extent(self, size: Any) -> Extent:
        """A size as FX notes it, or the expression of a number."""
        return extent(size, self._fixed)

    def layout(self, shape: Iterable[Any]) -> Layout:
        """The layout of a tensor whose true elements come first along each dimension."""
        return tuple((self.extent(size),) for size in shape)

    def _evaluate(self, e: Extent) -> int:
        if not is_static(e) and not e.free_symbols <= self._padded.keys():
            raise Unsound(f"the size {e}, which depends on data")
        return int(evaluated(e, self._padded))

    def _compute(self, e: Any) -> Array:
        """The true value, 0-d, int64 or float64."""
        if isinstance(e, int) or e.is_Integer:
            return hlo.constant(int(e), torch.int64)
        if e.is_Float:
            return hlo.constant(float(e), torch.float64)
        if e.is_Symbol:
            if e not in self._true:
                raise Unsound(f"the number {e}, which depends on data")
            return self._true[e]
        arguments = [self.true(a) for a in e.args]
        if e.is_Pow and e.args[1].is_Integer and e.args[1] >= 0:
            return _folded("mul", [arguments[0]] * int(e.args[1]))
        for kind, name in ((sympy.Add, "add"), (sympy.Mul, "mul"), (functions.Max, "max"), (functions.Min, "min")):
            if isinstance(e, kind):
                return _folded(name, arguments)
        if isinstance(e, _DIVISIONS):
            return _floor_divided(*arguments)
        if isinstance(e, _REMAINDERS):
            return arguments[0] - _floor_divided(*arguments) * arguments[1]
        if type(e).__name__ in _OF_FLOATS:
            return _OF_FLOATS[type(e).__name__](*(hlo.convert(a, torch.float64) for a in arguments))
        raise Unsound(f"the number {e}")


_OPERATIONS: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "max": hlo.maximum,
    "min": hlo.minimum,
}


# What Python's numbers become in a graph, by the names of PyTorch's functions for SymPy.
_OF_FLOATS: dict[str, Any] = {
    "ToFloat": lambda x: x,
    "IntTrueDiv": hlo.divide,
    "FloatTrueDiv": hlo.divide,
    "FloatPow": hlo.power,
    "OpaqueUnaryFn_sqrt": hlo.sqrt,
    "OpaqueUnaryFn_log": hlo.log,
}


def _folded(name: str, arrays: list[Array]) -> Array:
    if any(a.dtype is torch.float64 for a in arrays):
        arrays = [hlo.convert(a, torch.float64) for a in arrays]
    result = arrays[0] if arrays else hlo.constant(1, torch.int64)
    for other in arrays[1:]:
        result = _OPERATIONS[name](result, other)
    return result


def _floor_divided(x: Array, y: Array) -> Array:
    towards_zero = hlo.divide(x, y)
    is_lower = (x - towards_zero * y).ne(0) & (x < 0).ne(y < 0)
    return hlo.select(is_lower, towards_zero - 1, towards_zero)
