"""Python floats that change from call to call (a learning rate, a temperature) stay inputs of one graph.

From the second value on Dynamo passes such a float as a 0-d tensor, whose number, a SymFloat, is an operand. A pass of
AOTAutograd puts the tensor back in its place, in arithmetic of two operands alone; for the number's sake of any other
operator it has the graph captured again for each value. So these operators are written as arithmetic of two operands
here, in the order in which PyTorch's kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten
Lists = tuple[Tensor, ...] | list[Tensor]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """For AOTAutograd: those with a changing float are decomposed, all others stay as they are."""
    return {operator: _where_it_changes(function) for operator, function in _DECOMPOSITIONS.items()}


def _where_it_changes(function: Callable[..., Any]) -> Callable[..., Any]:
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _has_changing(*args, *kwargs.values()) else NotImplemented

    return decomposition


def _has_changing(*values: Any) -> bool:
    return any(isinstance(v, SymFloat) or (isinstance(v, (list, tuple)) and _has_changing(*v)) for v in values)


def _tensor(number: Any, like: Tensor) -> Tensor:
    """A 0-d tensor of the number: the product of two operands, so that the pass knows it."""
    return torch.ones((), dtype=torch.float64, device=like.device) * number


def _each(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The same for lists; a number is everybody's, of a list of numbers each has one."""

    def for_lists(first: Any, *others: Any, **kwargs: Any) -> list[Tensor]:
        count = max(len(a) for a in (first, *others) if isinstance(a, (list, tuple)))

        def at(i: int, value: Any) -> Any:
            return value[i] if isinstance(value, (list, tuple)) else value

        return [
            function(*(at(i, a) for a in (first, *others)), **{k: at(i, v) for k, v in kwargs.items()})
            for i in range(count)
        ]

    return for_lists


def _add(a: Tensor, b: Any, *, alpha: Any = 1) -> Tensor:
    return a + b * alpha if isinstance(alpha, SymFloat) else NotImplemented  # the pass knows a + b


def _subtract(a: Tensor, b: Any, *, alpha: Any = 1) -> Tensor:
    return a - b * alpha if isinstance(alpha, SymFloat) else NotImplemented


def _add_product(a: Tensor, b: Tensor, c: Tensor, value: Any = 1) -> Tensor:
    return a + b * value * c


def _add_quotient(a: Tensor, b: Tensor, c: Tensor, value: Any = 1) -> Tensor:
    return a + b * value / c


def _interpolate(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return torch.lerp(a, b, _tensor(weight, a).to(a.dtype))


def _power(base: Any, exponent: Any) -> Tensor:
    if isinstance(base, Tensor):
        return torch.pow(base, _tensor(exponent, base).to(base.dtype))
    return torch.pow(_tensor(base, exponent).to(exponent.dtype), exponent)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = (None if bound is None else _tensor(bound, x).to(x.dtype) for bound in (low, high))
    return torch.clamp(x, low, high)


def _multiply_lists(a: Lists, number: Any) -> Lists:
    return torch._foreach_mul(a, _tensor(number, a[0]))


def _divide_lists(a: Lists, number: Any) -> Lists:
    return torch._foreach_div(a, _tensor(number, a[0]))


def _add_lists(a: Lists, b: Lists, *, alpha: Any = 1) -> Lists:
    return torch._foreach_add(a, _multiply_lists(b, alpha))


def _subtract_lists(a: Lists, b: Lists, *, alpha: Any = 1) -> Lists:
    return torch._foreach_sub(a, _multiply_lists(b, alpha))


def _add_products(a: Lists, b: Lists, c: Lists, value: Any = 1) -> Lists:
    return torch._foreach_add(a, torch._foreach_mul(_multiply_lists(b, value), c))


def _add_quotients(a: Lists, b: Lists, c: Lists, value: Any = 1) -> Lists:
    return torch._foreach_add(a, torch._foreach_div(_multiply_lists(b, value), c))


_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    _aten.add.Tensor: _add,
    _aten.add.Scalar: lambda a, b, alpha=1: a + b * alpha,
    _aten.sub.Tensor: _subtract,
    _aten.sub.Scalar: lambda a, b, alpha=1: a - b * alpha,
    _aten.rsub.Scalar: lambda a, b, alpha=1: b + -(a * alpha),
    _aten.mul.Scalar: torch.mul,
    _aten.div.Scalar: torch.div,
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Scalar: _power,
    _aten.addcmul.default: _add_product,
    _aten.addcdiv.default: _add_quotient,
    _aten.lerp.Scalar: _interpolate,
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    _aten._foreach_add.List: _add_lists,
    _aten._foreach_sub.List: _subtract_lists,
    _aten._foreach_mul.Scalar: _multiply_lists,
    _aten._foreach_div.Scalar: _divide_lists,
    _aten._foreach_addcmul.Scalar: _add_products,
    _aten._foreach_addcdiv.Scalar: _add_quotients,
    _aten._foreach_add.Scalar: _each(torch.add),
    _aten._foreach_sub.Scalar: _each(torch.sub),
    _aten._foreach_add.ScalarList: _each(torch.add),
    _aten._foreach_sub.ScalarList: _each(torch.sub),
    _aten._foreach_mul.ScalarList: _each(torch.mul),
    _aten._foreach_div.ScalarList: _each(torch.div),
    _aten._foreach_addcmul.ScalarList: _each(_add_product),
    _aten._foreach_addcdiv.ScalarList: _each(_add_quotient),
    _aten._foreach_lerp.Scalar: _each(_interpolate),
    _aten._foreach_lerp.ScalarList: _each(_interpolate),
    _aten._foreach_pow.Scalar: _each(_power),
    _aten._foreach_pow.ScalarList: _each(_power),
    _aten._foreach_pow.ScalarAndTensor: _each(_power),
}
