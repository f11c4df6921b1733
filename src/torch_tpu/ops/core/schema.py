"""What an operator's schema says: which arguments are tensors, data or structure, what is written, what is a view."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_DATA = frozenset({"number", "Optional[number]", "float", "Optional[float]"})
_DATA_LISTS = frozenset({"List[number]"})
_TENSORS = frozenset({"Tensor", "Optional[Tensor]"})
_TENSOR_LISTS = frozenset({"List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"})


class Argument(NamedTuple):
    """One argument of an operator.

    Attributes:
        is_data: a number whose value is an input of the program, not part of it.
        is_written: the operator changes it in place.
        is_out: an `out=` argument.
    """

    name: str
    kind: str
    is_tensor: bool
    is_tensor_list: bool
    is_data: bool
    is_data_list: bool
    is_written: bool
    is_out: bool
    keyword_only: bool
    default: Any


class Signature(NamedTuple):
    """An operator's schema, read once.

    Attributes:
        returns_tensor: which of its results are tensors, not numbers or lists.
    """

    arguments: tuple[Argument, ...]
    positions: dict[str, int]
    returns_alias: tuple[bool, ...]
    returns_tensor: tuple[bool, ...]
    is_view: bool
    is_inplace: bool
    is_out: bool
    returns_list: bool


@cache
def signature(func: OpOverload) -> Signature:
    schema = func._schema
    arguments = []
    for a in schema.arguments:
        kind = str(a.type)
        written = a.alias_info is not None and a.alias_info.is_write
        arguments.append(
            Argument(
                a.name,
                kind,
                kind in _TENSORS,
                kind in _TENSOR_LISTS,
                kind in _DATA,
                kind in _DATA_LISTS,
                written,
                bool(a.is_out),
                a.kwarg_only,
                a.default_value if a.has_default_value() else None,
            )
        )
    returns_alias = tuple(r.alias_info is not None for r in schema.returns)
    writes = any(a.is_written for a in arguments)
    is_out = any(a.is_out for a in arguments)
    return Signature(
        tuple(arguments),
        {a.name: i for i, a in enumerate(arguments)},
        returns_alias,
        tuple(str(r.type) in _TENSORS for r in schema.returns),
        is_view=any(returns_alias) and not writes,
        is_inplace=writes and not is_out,
        is_out=is_out,
        returns_list=len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]",
    )


def call(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an overload whose kernel was given these arguments.

    A number that a tensor was made of arrives in kernels as a number again. PyTorch's parser takes it in place of a
    tensor for a few operators only; the others have an overload for it.
    """
    numbers = any(
        a.is_tensor and isinstance(v, (bool, int, float, complex))
        for a, v in zip(signature(func).arguments, args, strict=False)
    )
    return (func.overloadpacket if numbers else func)(*args, **kwargs)


def bind(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A value for every argument of the schema, defaults filled in."""
    arguments = signature(func).arguments
    values = list(args)
    for a in arguments[len(args) :]:
        values.append(kwargs.get(a.name, a.default))
    return values


def unbind(func: OpOverload, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `bind`: positional and keyword arguments."""
    arguments = signature(func).arguments
    positional = tuple(v for a, v in zip(arguments, values, strict=True) if not a.keyword_only)
    keyword = {a.name: v for a, v in zip(arguments, values, strict=True) if a.keyword_only}
    return positional, keyword


def overload(packet: str, name: str, namespace: str = "aten") -> OpOverload | None:
    """An overload by name, or None."""
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, name or "default", None) if found is not None else None
