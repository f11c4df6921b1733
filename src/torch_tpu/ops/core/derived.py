"""Operators whose form follows from another one's: in-place, `out=` and foreach variants of functional operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ops.core import registry
from torch_tpu.ops.core.schema import Argument, overload, signature

# In-place and `out=` operators whose functional twin has another name.
_FUNCTIONAL_NAMES = {
    "_slow_conv2d_backward.grad_input": ("_slow_conv2d_backward", "output_mask"),
    "adaptive_avg_pool3d_backward.grad_input": ("_adaptive_avg_pool3d_backward", ""),
    "normal.out": ("normal_functional", ""),
    "normal_": ("normal_functional", ""),
    "bernoulli_.float": ("bernoulli", "p"),
    "bernoulli_.Tensor": ("bernoulli", "Tensor"),
    "random_": ("random", ""),
    "random_.to": ("random", "to"),
    "random_.from": ("random", "from"),
    "squeeze_": ("squeeze_copy", ""),
    "pow_.Scalar": ("pow", "Tensor_Scalar"),
    "pow_.Tensor": ("pow", "Tensor_Tensor"),
    "float_power_.Scalar": ("float_power", "Tensor_Scalar"),
    "float_power_.Tensor": ("float_power", "Tensor_Tensor"),
    "floor_divide_.Tensor": ("floor_divide", ""),
    "ldexp_": ("ldexp", "Tensor"),
}


@cache
def functional(func: OpOverload) -> OpOverload | None:
    """The functional overload an in-place or `out=` overload computes."""
    sig = signature(func)
    packet, _, name = func._schema.name.partition("::")[2], "", func._schema.overload_name
    namespace = func.namespace
    key = f"{packet}.{name}" if name else packet
    if key in _FUNCTIONAL_NAMES:
        return overload(*_FUNCTIONAL_NAMES[key])
    if sig.is_out:
        wanted = [(a.name, a.kind) for a in sig.arguments if not a.is_out]
        candidates = [name.removesuffix("_out"), "" if name == "out" else name.removesuffix("out"), "", name]
        for candidate in [*candidates, *_overload_names(namespace, packet)]:
            found = overload(packet, candidate, namespace)
            if (
                found is not None
                and found is not func
                and not signature(found).is_out
                and _written(found) <= _written(func)
            ):
                own = [(a.name, a.kind) for a in signature(found).arguments]
                if [a for a in own if a[0] not in ("dtype", "layout", "device", "pin_memory")] == [
                    a for a in wanted if a[0] not in ("dtype", "layout", "device", "pin_memory")
                ]:
                    return found
        return None
    if sig.is_inplace and packet.endswith("_"):
        found = overload(packet[:-1], name, namespace)
        if found is not None and not signature(found).is_inplace and _same_kinds(func, found):
            return found
    return None


def _written(func: OpOverload) -> set[str]:
    """Arguments that an operator changes besides those for its results: running statistics, noise."""
    return {a.name for a in signature(func).arguments if a.is_written and not a.is_out}


def _same_kinds(func: OpOverload, twin: OpOverload) -> bool:
    """Whether one operator's arguments may be given to the other: not so for polygamma(n, x) and x.polygamma_(n)."""
    pairs = zip(signature(func).arguments, signature(twin).arguments, strict=False)
    return all(a.kind == b.kind for a, b in pairs)


def _overload_names(namespace: str, packet: str) -> list[str]:
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return [] if found is None else [n for n in found.overloads() if "out" not in n]


@cache
def lowering(func: OpOverload) -> registry.Lowering | None:
    """An operator's own lowering, or that of the functional operator its in-place form computes."""
    own = registry.find(func)
    if own is not None or not signature(func).is_inplace:
        return own
    twin = functional(func)
    return registry.find(twin) if twin is not None else None


def _foreach_overload(packet: str, name: str) -> OpOverload | None:
    base = packet.removeprefix("_foreach_")
    choices = {
        "": ["", "Tensor"],
        "List": ["Tensor", "", "Tensor_Tensor", "Scalar"],
        "Scalar": ["Scalar", "Tensor_Scalar", "Tensor", ""],
        "ScalarList": ["Scalar", "Tensor_Scalar", "Tensor", ""],
        "Tensor": ["Tensor", ""],
    }
    if base in ("maximum", "clamp_min") and name in ("Scalar", "ScalarList"):
        base, order = "clamp_min", [""]
    elif base in ("minimum", "clamp_max") and name in ("Scalar", "ScalarList"):
        base, order = "clamp_max", [""]
    elif base in ("addcdiv", "addcmul"):
        # A tensor of values is a host tensor, which PyTorch's composite kernel reads.
        order = [""] if name != "Tensor" else []
    elif base == "norm":
        base, order = "linalg_vector_norm", [""]
    elif base == "pow" and name == "ScalarAndTensor":
        order = ["Scalar"]
    elif base == "pow":
        order = ["Tensor_Tensor"] if name == "List" else ["Tensor_Scalar"]
    elif base == "add" and name == "Tensor":
        order = ["Tensor"]
    else:
        order = choices.get(name, [])
    for candidate in order:
        found = overload(base, candidate)
        if found is not None and registry.find(found) is not None:
            return found
    return None


@cache
def foreach_element(func: OpOverload) -> OpOverload | None:
    """The single-tensor operator that a foreach operator applies to each entry of its lists, if it has a lowering."""
    packet = func._schema.name.partition("::")[2]
    if not packet.startswith("_foreach_") or signature(func).is_out:
        return None
    return _foreach_overload(packet.removesuffix("_"), func._schema.overload_name)


_FUSED_OPTIMIZERS = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})


def is_entrywise(func: OpOverload) -> bool:
    """Whether an operator does the same to each entry of its lists, independently of the others."""
    return foreach_element(func) is not None or func._schema.name.partition("::")[2] in _FUSED_OPTIMIZERS


def writes_lists(func: OpOverload) -> bool:
    """Whether an operator is an in-place form of foreach."""
    return func._schema.name.startswith("aten::_foreach_") and signature(func).is_inplace


def foreach_calls(func: OpOverload, values: list[Any]) -> list[list[Any]]:
    """Per entry, the arguments of the single-tensor operator."""
    arguments = signature(func).arguments
    count = next(len(v) for a, v in zip(arguments, values, strict=True) if a.is_tensor_list)
    calls = []
    for i in range(count):
        calls.append(
            [
                v[i] if isinstance(v, (list, tuple)) and (a.is_tensor_list or a.is_data_list) else v
                for a, v in zip(arguments, values, strict=True)
            ]
        )
    return calls


# Whether a number given for an argument is an input of the program; where that depends on the number, a predicate.
IsData = bool | Callable[[Any], bool]


def is_data(func: OpOverload, argument: Argument) -> IsData:
    """Whether what is given for an argument is an input of the program: never so where the operator is decomposed."""
    rule = lowering(func)
    if rule is None and (element := foreach_element(func)) is not None:
        rule = registry.find(element)
    if rule is None:
        return False
    if argument.name in rule.data:
        return True
    if not (argument.is_data or argument.is_data_list or argument.is_tensor or argument.is_tensor_list):
        return False
    if argument.name not in rule.static:
        return True
    is_structure = rule.static[argument.name]
    return is_structure is not None and (lambda number: not is_structure(number))


def written_arguments(func: OpOverload, rule: registry.Lowering) -> list[int]:
    """Positions of the arguments whose new values follow the fresh results."""
    extra = set(rule.mutates)
    return [i for i, a in enumerate(signature(func).arguments) if a.is_written or a.name in extra]
