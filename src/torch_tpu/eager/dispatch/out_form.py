"""`out=` overloads: the functional operator's result, placed into the caller's tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.deferred import thread_graphs
from torch_tpu.eager.host.fallback import as_cpu_raises, cpu_error, run_on_cpu
from torch_tpu.eager.host.memory_overlap import check_overlap
from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.eager.overload_table import overload
from torch_tpu.hlo.strided import SharedElements, is_dense, shares_elements
from torch_tpu.ops.core.argument_mapper import tensors
from torch_tpu.ops.core.schema import bind, call, signature, unbind
from torch_tpu.tensor.errors import device_mismatch

# These compute in the dtype of `out` unless another one is asked for.
_IN_DTYPE_OF_OUT = frozenset({"cumprod", "cumsum", "mean", "nansum", "prod", "sum"})
# These resize an `out` that has not as many elements; one of another shape that has keeps it.
_FILLS = frozenset({"arange", "linspace", "logspace"})


class OutKernel:
    """The kernel of an `out=` overload."""

    __slots__ = ("func", "functional", "name", "sig", "takes_dtype")

    def __init__(self, func: OpOverload, functional: OpOverload) -> None:
        self.func = func
        self.functional = functional
        self.sig = signature(func)
        self.name = func._schema.name.partition("::")[2]
        names = {a.name for a in signature(functional).arguments}
        self.takes_dtype = "dtype" in names and "dtype" not in self.sig.positions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = bind(self.func, args, kwargs)
        arguments = self.sig.arguments
        outs = [v for a, v in zip(arguments, values, strict=True) if a.is_out]
        given = {a.name: v for a, v in zip(arguments, values, strict=True) if not a.is_out}
        for out in tensors(outs):
            if out.device.type != "tpu":
                raise device_mismatch(out)
        for value in tensors(given):
            # A host tensor of one number may be an operand.
            if value.device.type != "tpu" and value.dim():
                raise device_mismatch(value)
        check_overlap(self.func, args, kwargs)
        if any(shares_elements(out.shape, out.stride()) for out in tensors(outs)):
            return run_on_cpu(self.func, args, kwargs, str(SharedElements()))
        # The form without a mask wants every result.
        given.setdefault("output_mask", [True] * len(outs))
        if self.takes_dtype:
            given["dtype"] = outs[0].dtype
            given["device"] = outs[0].device
        elif self.name in _IN_DTYPE_OF_OUT and given["dtype"] is None:
            given["dtype"] = outs[0].dtype
            if outs[0].dtype is not given["self"].dtype:
                raise_as_cpu(self.func, args, kwargs)
        bound = [given.get(a.name, a.default) for a in signature(self.functional).arguments]
        positional, keyword = unbind(self.functional, bound)
        recording = thread_graphs.current()
        first = recording.next_slot()
        try:
            results = call(self.functional, positional, keyword)
        except (RuntimeError, TypeError, IndexError) as raised:
            raise as_cpu_raises(self.func, args, kwargs, raised) from None
        flat = list(tensors(results))
        if self.name in _FILLS and outs[0].numel() == flat[0].numel():
            flat = [flat[0].reshape(outs[0].shape)]
        pairs = list(zip(tensors(outs), flat, strict=True))
        # Which other dtypes and shapes `out` may have, and what is raised for the rest, is each operator's own affair.
        operands = list(tensors(given))
        fits = all(
            out.dtype is r.dtype
            and (out.shape == r.shape or not (out.numel() or any(out is operand for operand in operands)))
            for out, r in pairs
        )
        # Where contents are asked, the CPU also judges what the operator's own conditions say.
        if not fits and (
            error := cpu_error(self.func, args, kwargs, before_reading=lambda: recording.forget_conditions(first))
        ):
            raise error
        for out, result in pairs:
            place(out, result)
        return outs[0] if len(outs) == 1 and not self.sig.returns_list else tuple(outs)


def new_out_kernel(name: str, functional: str) -> Callable[..., Any]:
    """The kernel of an `out=` overload by its name, made when it is first called."""
    kernel: OutKernel | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            kernel = OutKernel(overload(name), overload(functional))
        return kernel(*args, **kwargs)

    return run


def raise_as_cpu(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the CPU raises for a call, if it does."""
    if error := cpu_error(func, args, kwargs):
        raise error


def place(out: torch.Tensor, result: torch.Tensor) -> None:
    """Writes `result` into `out` as PyTorch does: resized, with strides as well, if it has another shape.

    Where `out` was not empty, the CPU has warned of it already (`cpu_error`): PyTorch keeps its warnings until the
    user's call returns, so trying a call on the CPU brings them to the user's line.
    """
    if out.shape != result.shape:
        out.resize_(result.shape)
        if is_dense(result.shape, result.stride()):
            out.as_strided_(result.shape, result.stride())
    HANDWRITTEN["copy_"](out, result)
