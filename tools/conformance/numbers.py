"""The axis "numbers": other values of Python's numbers, and of numbers in 0-d tensors of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from tools.conformance.subject import Subject, check_calls, leaves_of, with_leaves

MOST_NUMBERS = 4
# Numbers that may be sizes or scales of sizes stay near what the database has.
SMALL_FLOATS = (0.0, -0.0, 0.5, -1.25)
SMALL_INTS = (0, 1, -1, 2, 3)
ANY_FLOATS = (*SMALL_FLOATS, 1e10, -1e7, math.inf, -math.inf, math.nan)
ANY_INTS = (*SMALL_INTS, -7, 200, 2**31, -(2**40) - 1, 2**63 - 1)
# In one place of a call these are three programs, however equal they are as keys.
EQUAL = (1, 1.0, True)
OPERAND_TYPES = frozenset({"number", "Optional[number]", "float", "Optional[float]"})
EQUAL_COMPLEX = (*EQUAL, 1 + 0j)


def check(
    subject: Subject, sample: Any, scalars: frozenset[int], allowed: Callable[[Any], bool] = lambda value: True
) -> None:
    """Calls that differ in one number, one after the other.

    Args:
        scalars: places of leaves that are operands, whose values no size follows from. They become large and infinite.
        allowed: which values may be given.
    """
    leaves = leaves_of(subject, sample)
    places = [i for i, leaf in enumerate(leaves) if _is_number(leaf)][:MOST_NUMBERS]
    for form in subject.forms(sample):
        for i in places:
            values = [leaves[i], *filter(allowed, _others(leaves[i], i in scalars)), leaves[i]]
            calls = [(f"argument {i} is {v!r}", _with(subject, sample, i, v)) for v in values]
            check_calls(form, calls)


def operands(aten_name: str, arguments: Any) -> frozenset[int]:
    """Places of the leaves that some overload of an operator takes as `Scalar` or `float`.

    Args:
        arguments: of a call, (input, args, kwargs). Where the first is no tensor, sizes may follow from numbers.
    """
    if not isinstance(_first(arguments[0]), torch.Tensor):
        return frozenset()
    packet = getattr(torch.ops.aten, aten_name, None)
    schemas = [getattr(packet, name)._schema for name in packet.overloads()] if packet is not None else []
    found = set()
    for i, (path, _) in enumerate(tree_flatten_with_path(arguments)[0]):
        keys = [getattr(k, "idx", getattr(k, "key", None)) for k in path]
        if len(keys) == 1:
            continue
        types = set()
        for schema in schemas:
            if keys[0] == 1 and isinstance(keys[1], int) and keys[1] + 1 < len(schema.arguments) and len(keys) == 2:
                types.add(str(schema.arguments[keys[1] + 1].type))
            types |= {str(a.type) for a in schema.arguments if keys[0] == 2 and [a.name] == keys[1:]}
        if types & OPERAND_TYPES and not types & {"int", "SymInt"}:
            found.add(i)
    return frozenset(found)


def _first(nest: Any) -> Any:
    return next(iter(tree_leaves(nest)), None)


def host_scalars(subject: Subject, sample: Any) -> Iterator[tuple[str, Any]]:
    """Samples in which the 0-d tensors have other values."""
    for factor in (1, -3, 0, 100, 1):

        def scaled(leaves: list[Any], factor: int = factor) -> Iterator[Any]:
            for leaf in leaves:
                is_scalar = isinstance(leaf, torch.Tensor) and not leaf.dim() and leaf.dtype is not torch.bool
                yield (leaf.detach() * factor).to(leaf.dtype) if is_scalar else leaf

        yield f"0-d host tensors times {factor}", with_leaves(subject, sample, scaled)


def _others(value: Any, is_scalar: bool) -> Iterator[Any]:
    if isinstance(value, complex):
        yield from (value * 2 + 1, -value, *((complex(math.nan, 1), complex(1e20, -math.inf)) if is_scalar else ()))
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.25, -value, *(ANY_FLOATS if is_scalar else SMALL_FLOATS))
    else:
        yield from (ANY_INTS if is_scalar else SMALL_INTS)
    if is_scalar:
        yield from EQUAL_COMPLEX if isinstance(value, complex) else EQUAL


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float, complex)


def _with(subject: Subject, sample: Any, at: int, value: Any) -> Any:
    return with_leaves(subject, sample, lambda leaves: [*leaves[:at], value, *leaves[at + 1 :]])
