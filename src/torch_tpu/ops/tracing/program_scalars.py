"""Numbers that a program computes and that its graph uses like Python's: loop counters, `item()`, unbacked sizes.

They can be operands and positions, because those may be data; what would have to be a size has no lowering.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.hlo import array as hlo
from torch_tpu.ops.core import derived
from torch_tpu.ops.core.registry import NoLowering
from torch_tpu.ops.core.schema import bind, signature
from torch_tpu.ops.tracing.tracer import Data, Tracer, Unknown

_aten = torch.ops.aten
# What is true of any number that gets this far, or is checked by the operators that use it.
_STATEMENTS = frozenset(
    {
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
        torch._check,
        torch._check_is_size,
    }
)

# Python's functions of numbers that mean the same of tensors, and what stands for those that don't.
_OF_TENSORS = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, operator.truediv, operator.mod),
        *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.and_, operator.or_),
        operator.pow,
    }
)
_FOR_TENSORS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
    torch.sym_not: torch.logical_not,
    torch.sym_float: lambda x: x.double(),
    torch.sym_int: lambda x: x.long(),
}


def call(tracer: Tracer, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a node of a graph with such a number among its arguments returns."""
    if target in _STATEMENTS:
        return None
    if target is _aten._assert_scalar.default:
        tracer.check(hlo.convert(args[0].array, torch.bool), str(args[1]))
        return None
    if target is _aten.select.int:
        return _select(tracer, *args)
    if isinstance(target, OpOverload):
        _require_data(target, bind(target, args, kwargs))
        return tracer.call(target, args, kwargs)
    compute = target if target in _OF_TENSORS else _FOR_TENSORS.get(target)
    if compute is None:
        raise NoLowering(f"{target} of a number that the program computes")
    return _arithmetic(tracer, compute, args)


def _arithmetic(tracer: Tracer, compute: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> Unknown:
    """Computes with 0-d tensors; as Python does, in float64 and int64."""
    arrays = [a.array if isinstance(a, Data) else hlo.constant(a, _WIDEST[type(a)]) for a in args]
    if compute is operator.truediv or any(a.dtype.is_floating_point for a in arrays):
        arrays = [hlo.convert(a, torch.float64) for a in arrays]
    numbers = [tracer.fresh(torch.empty((), dtype=a.dtype, device="meta"), a) for a in arrays]
    with tracer:
        result = compute(*numbers)
    return Unknown(tracer.read(result))


_WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _require_data(func: OpOverload, values: list[Any]) -> None:
    for argument, value in zip(signature(func).arguments, values, strict=True):
        inside = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, Unknown) for v in inside) and derived.is_data(func, argument) is not True:
            raise NoLowering(f"{func} whose {argument.name} is known only when the program runs")


def _select(tracer: Tracer, tensor: torch.Tensor, dim: int, index: Unknown) -> torch.Tensor:
    """`tensor.select(dim, index)`, copied: an index may be negative, and is checked."""
    size = tensor.shape[dim]
    position = hlo.convert(index.array, torch.int64)
    tracer.check(
        (position >= -size) & (position < size),
        f"select(): index {{}} out of range for tensor of size {list(tensor.shape)} at dimension {dim}",
        IndexError,
        position,
    )
    position = hlo.select(position < 0, position + size, position)
    zero = hlo.constant(0, torch.int64)
    like = torch.select(tensor, dim, 0).clone()
    starts = [position if d == dim % tensor.dim() else zero for d in range(tensor.dim())]
    sizes = [1 if d == dim % tensor.dim() else s for d, s in enumerate(tensor.shape)]
    row = hlo.dynamic_slice(tracer.read(tensor), starts, sizes)
    return tracer.fresh(like, hlo.reshape(row, tuple(like.shape)))
