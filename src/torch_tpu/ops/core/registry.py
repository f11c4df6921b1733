"""The table of lowerings: which function expresses which ATen overload in StableHLO.

A lowering is a function of Arrays that returns Arrays:

    @lower("addmm")
    def addmm(bias, a, b, *, beta, alpha):
        return beta * bias + alpha * dot(a, b)

It receives every argument of the operator's schema, by position or keyword as the schema has it: tensors as Arrays
(None where an optional one is missing), lists as lists, numbers that are data (`Scalar`, `float`) as 0-d Arrays or,
where the caller left the default, as the plain default; everything else (sizes, dimensions, flags, dtypes) as it is.

It returns the operator's fresh results in schema order (None for one that nobody asked for), then the new value of each
argument the schema marks as written (None for "unchanged"). In-place, `out=` and foreach forms need no entry:
`ops.core.derived` makes them of this one.

Parameters a lowering may ask for by name, beyond the schema's:
    out: `Spec` (or a list of them) of the fresh results, as PyTorch's meta kernel says.
    common: the dtype PyTorch's promotion gives the operands together.
    rng: `Rng`, the source of random bits.
    check: `check(condition, message, error, value)`: a 0-d bool Array that must hold; a 0-d `value` replaces `{}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch._ops import HigherOrderOperator, OpOverload

from torch_tpu.ops.core import families

Function = TypeVar("Function", bound=Callable[..., Any])
Check = Callable[..., None]
EXTRAS = ("out", "common", "rng", "check")
# Says of a number whether it is part of the program.
IsStructure = Callable[[Any], bool]


class Spec(NamedTuple):
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Lowering:
    """How one operator is expressed.

    Attributes:
        static: names of number arguments that are part of the program, not data; with a predicate, those values of it
            that are (None: all).
        data: names of integer arguments (a position, not a size) that are data; they arrive as int64 Arrays.
        mutates: names of arguments written although the schema does not say so.
        wide: numbers arrive as float64, though no tensor has 64 bits: the formula subtracts them from each other.
        extras: which of `EXTRAS` the function asks for.
    """

    name: str
    function: Callable[..., Any]
    static: Mapping[str, IsStructure | None]
    data: frozenset[str]
    mutates: tuple[str, ...]
    wide: bool
    extras: tuple[str, ...]


def negative(number: Any) -> bool:
    """For `static`: numbers that the operator refuses. As part of the program, each is refused whenever it is given."""
    return not number >= 0


class NoLowering(NotImplementedError):
    """An operator that has neither a lowering nor a decomposition into operators that have one."""

    def __init__(self, operator: OpOverload | HigherOrderOperator | str) -> None:
        super().__init__(f"{operator} has no lowering")


_lowerings: dict[str, Lowering] = {}
_higher_order: dict[str, Callable[..., Any]] = {}
_decompositions: dict[str, Callable[..., Any]] = {}
# The family that registers each operator: what loads its lowering, and where docs/operators.md sends its reader.
_families: dict[str, str] = {}


def name_of(func: OpOverload) -> str:
    """The registry's name of an overload: "add.Tensor", "relu", "prims::iota"."""
    namespace, _, name = func._schema.name.partition("::")
    full = name if not func._schema.overload_name else f"{name}.{func._schema.overload_name}"
    return full if namespace == "aten" else f"{namespace}::{full}"


# Of operators whose library is imported when PyTorch, or this package, is.
_KNOWN_NAMESPACES = ("aten", "prims", "tpu")


def _check_name(name: str, function: Callable[..., Any]) -> None:
    """Raises where an overload has a lowering or decomposition already, or this PyTorch has no such overload."""
    known = _lowerings[name].function if name in _lowerings else _decompositions.get(name)
    if known is not None:
        raise ValueError(f"{name} has two lowerings: {_where(known)} and {_where(function)}")
    full = name if "::" in name else f"aten::{name}"
    packet, _, overload = full.partition(".")
    if full.partition("::")[0] not in _KNOWN_NAMESPACES:
        return
    try:
        torch._C._dispatch_find_schema_or_throw(packet, overload)
    except RuntimeError:
        raise ValueError(_missing(f"operator {full}", function)) from None


def _missing(operator: str, function: Callable[..., Any]) -> str:
    return f"PyTorch {torch.__version__} has no {operator}, which {_where(function)} lowers"


def _where(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def lower(
    *names: str,
    static: Iterable[str] | Mapping[str, IsStructure] = (),
    data: Iterable[str] = (),
    mutates: Iterable[str] = (),
    wide: bool = False,
) -> Callable[[Function], Function]:
    """Registers a lowering for overloads of `aten` (or "namespace::name.overload")."""

    def register(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        extras = tuple(name for name in EXTRAS if name in parameters)
        structure = dict(static) if isinstance(static, Mapping) else dict.fromkeys(static)
        family = families.registering()
        for name in names:
            _check_name(name, function)
            _families[name] = family
            _lowerings[name] = Lowering(name, function, structure, frozenset(data), tuple(mutates), wide, extras)
        return function

    return register


def decompose(*names: str) -> Callable[[Function], Function]:
    """Registers a function of tensors, written with torch operators, that replaces an operator."""

    def register(function: Function) -> Function:
        family = families.registering()
        for name in names:
            _check_name(name, function)
            _families[name] = family
            _decompositions[name] = function
        return function

    return register


def lower_higher_order(*names: str) -> Callable[[Function], Function]:
    """Registers what lowers a higher-order operator: a function of the tracer and the operator's arguments.

    It gets meta tensors and graphs, and returns what the operator returns.
    """

    def register(function: Function) -> Function:
        family = families.registering()
        for name in names:
            if name in _higher_order:
                raise ValueError(f"{name} is lowered twice: {_where(_higher_order[name])} and {_where(function)}")
            if not hasattr(torch.ops.higher_order, name):
                raise ValueError(_missing(f"higher-order operator {name}", function))
            _families[name] = family
            _higher_order[name] = function
        return function

    return register


def higher_order(func: HigherOrderOperator) -> Callable[..., Any] | None:
    families.load_family_of(func.name())
    return _higher_order.get(func.name())


def find(func: OpOverload) -> Lowering | None:
    name = name_of(func)
    families.load_family_of(name)
    return _lowerings.get(name)


def decomposition(func: OpOverload) -> Callable[..., Any] | None:
    """This project's decomposition of an operator, else PyTorch's."""
    name = name_of(func)
    families.load_family_of(name)
    own = _decompositions.get(name)
    if own is not None:
        return own
    return torch._decomp.decomposition_table.get(func)


def decomposes_here(func: OpOverload) -> bool:
    """Whether this project gives a decomposition of its own for an operator."""
    name = name_of(func)
    families.load_family_of(name)
    return name in _decompositions


def module_of(func: OpOverload) -> str | None:
    """The module that registers an operator's lowering or decomposition; None where there is none here."""
    families.load()
    family = _families.get(name_of(func))
    return f"torch_tpu.ops.{family}" if family else None


def names() -> list[str]:
    """Every overload with a lowering of its own."""
    families.load()
    return sorted(_lowerings)


def index() -> dict[str, str]:
    """The family of every operator with a lowering or decomposition of its own."""
    families.load()
    return dict(_families)
