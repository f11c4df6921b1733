"""Asks PyTorch's CPU kernels whether they take the dtypes, dimensions and kinds of numbers of a call.

PyTorch's meta kernels let much through that every CPU kernel refuses: mixed dtypes of a norm, a bool `alpha` for
integers. A call is tried once, when its program is traced, on small tensors of the same dtypes. Only words about dtypes
and numbers count: contents are made up, and so are large shapes of operators that take any. Others with large tensors
are not tried.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ops.core.argument_mapper import cpu_error_with, tensors
from torch_tpu.ops.core.schema import bind, signature, unbind

# Tensors of so many elements are tried as they are; of larger ones each size becomes a small one of its own.
_SMALL = 2**9
_ABOUT_DTYPES = re.compile(
    r"type|not implemented for|not supported|[Bb]ool|integral|integer|[Ff]loating|[Cc]omplex|Found|Expected .* but got"
)
_NO_KERNEL = re.compile("not implemented for|not supported for")
# What the CPU has no kernel for, although accelerators do: half precision, and dtypes that are new.
_RARE = re.compile(r"not implemented for '(Half|BFloat16|Float8\w*|UInt16|UInt32|UInt64|ComplexHalf)'")
_NOT_OF_THE_CALL = re.compile(r"Could not run|[Pp]rivate[Uu]se1|out of bounds|for CPU|CPU tensor")
# What accelerators take and the CPU has no kernel for: Transformers counts integers wherever it is not on a CPU.
_TAKE_MORE = frozenset({"aten::histc"})
# Operators some of whose numbers have a domain of their own.
_WITH_DOMAIN = frozenset({"celu", "histc", "linspace", "logspace", "renorm", "softshrink"})
# What the CPU calls an operator that is the device's alone.
_ON_CPU: dict[OpOverload, OpOverload] = {
    torch.ops.aten.convolution_overrideable.default: torch.ops.aten.convolution.default
}
# They take floats of one dtype, and long to try.
_COSTLY = re.compile(r"aten::(convolution|_?linalg_)")
# The CPU would warn, and the kernel does so itself (`eager.kernels.cpu_warnings`); meta kernels know their dtypes.
_WARNING = re.compile(r"aten::(var|std)(_mean)?$")
# Calls that the CPU takes: the operator, dtypes and all that is no tensor.
_accepted: set[tuple[OpOverload, str]] = set()
_MOST_ACCEPTED = 4096
# Private kernels that look at every entry they are given, as the public ones do that they serve.
_CHECKED_PRIVATE = re.compile(
    "_foreach_|_softmax$|_log_softmax$|_to_copy|_adaptive_avg_pool|_native_batch_norm_legit|_batch_norm_(with|no)_update"
)
# They take tensors of any sizes, as long as the equal ones are equal, and no sizes as numbers.
_ANY_SIZES = re.compile(
    r"((mm|addmm|bmm|baddbmm|mv|addmv|dot|native_batch_norm)_?|_native_batch_norm_legit\w*|_batch_norm_(with|no)_update\w*)$"
)
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def on_cpu(func: OpOverload) -> OpOverload:
    """The operator of the CPU that does what `func` does."""
    return _ON_CPU.get(func, func)


def check_kinds(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU raises if it refuses the dtypes of a call's tensors or its numbers.

    Args:
        args, kwargs: with meta tensors, and numbers as they are.
    """
    if func.namespace != "aten" or not (any(True for _ in tensors([args, kwargs])) or has_domain(func)):
        return
    func = on_cpu(func)
    if _WARNING.match(func._schema.name):
        return
    unusual = _is_unusual([*args, *kwargs.values()])
    if not unusual and _COSTLY.match(func._schema.name):
        return
    if not _is_safe(func, args, kwargs):
        return
    key = (func, repr(described([args, kwargs])))
    if key in _accepted:
        return
    sizes = _small_sizes(args, kwargs)
    error = _tried(func, args, kwargs, sizes)
    if error is None:
        if len(_accepted) >= _MOST_ACCEPTED:
            _accepted.clear()
        _accepted.add(key)
        return
    if _RARE.search(str(error)) or _NOT_OF_THE_CALL.search(str(error)):
        return
    if func._schema.name in _TAKE_MORE and _NO_KERNEL.search(str(error)):
        return
    if _is_about_number(func, args, kwargs, sizes, error):
        raise error
    if isinstance(error, IndexError) and not any(sizes.get(v, v) != v for v in _integers([args, kwargs])):
        if str(error).startswith("Dimension out of range"):
            raise error
        return
    if not (_NO_KERNEL if sizes and not unusual else _ABOUT_DTYPES).search(str(error)):
        return
    # With floats instead, the same small shapes are fine.
    if sizes and unusual and _tried(func, args, kwargs, sizes, floats=torch.float32) is not None:
        return
    raise error


def check_numbers(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the CPU raises for the numbers of a call; None if it takes them.

    Args:
        args, kwargs: with tensors of any device, of which only shapes and dtypes count.
    """
    if not _is_safe(func, args, kwargs):
        return None
    sizes = _small_sizes(args, kwargs)
    error = _tried(func, args, kwargs, sizes)
    return error if error is not None and _is_about_number(func, args, kwargs, sizes, error) else None


def _is_safe(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a CPU kernel can be tried: it may trust its caller with sizes that have to fit each other.

    So private kernels are never tried, and smaller sizes are given to those alone that take any.
    """
    name = func._schema.name.partition("::")[2]
    if name.startswith("_") and not _CHECKED_PRIVATE.match(name):
        return False
    return torch.Tag.pointwise in func.tags or _ANY_SIZES.match(name) is not None or not _small_sizes(args, kwargs)


def _is_about_number(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[int, int], error: Exception
) -> bool:
    if "without overflow" in str(error):
        return True
    if not has_domain(func):
        return False
    # With the number 1 instead, the call is fine.
    ones = [
        1.0 if a.is_data and value is not None else value
        for a, value in zip(signature(func).arguments, bind(func, args, kwargs), strict=True)
    ]
    return _tried(func, *unbind(func, ones), sizes) is None


@cache
def has_domain(func: OpOverload) -> bool:
    """Whether an operator refuses some numbers that its tensors' dtypes could hold."""
    return func._schema.name.partition("::")[2].rstrip("_").removesuffix("_backward") in _WITH_DOMAIN


def _small_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """By what the sizes of large tensors are replaced: equal ones by equal ones, larger ones by larger ones."""
    found = list(tensors([args, kwargs]))
    if sum(t.numel() for t in found) <= _SMALL:
        return {}
    given = {size for t in found for size in t.shape}
    return {size: size if size < 3 else 3 + k for k, size in enumerate(sorted(given))}


def described(value: Any) -> Any:
    """Arguments with dtypes and numbers of dimensions in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, dict):
        return {k: described(v) for k, v in value.items()}
    return [described(v) for v in value] if isinstance(value, (list, tuple)) else value


def _is_unusual(values: Any) -> bool:
    dtypes = {t.dtype for t in tensors(values)}
    if not dtypes:
        return False
    return len(dtypes) > 1 or not dtypes <= _FLOATS or any(type(v) in (bool, complex) for v in values)


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return _integers(list(value.values()))
    return (
        [i for v in value for i in _integers(v)] if isinstance(value, (list, tuple)) else [value] * (type(value) is int)
    )


def _tried(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: dict[int, int],
    *,
    floats: torch.dtype | None = None,
) -> Exception | None:
    """What the CPU raises for a call on tensors with other contents and, by `sizes`, other sizes.

    Args:
        floats: the dtype of floating-point tensors, if not their own.
    """

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        dtype = floats if floats is not None and t.dtype.is_floating_point else t.dtype
        # Zero is an index that exists, one a divisor and a variance.
        return torch.full([sizes.get(s, s) for s in t.shape], 1 if dtype.is_floating_point else 0, dtype=dtype)

    def smaller(value: Any) -> Any:
        return sizes.get(value, value) if type(value) is int else value

    error = cpu_error_with(func, args, kwargs, stand_in, smaller)
    return error if isinstance(error, (RuntimeError, TypeError, ValueError, IndexError)) else None
