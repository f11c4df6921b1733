"""Operators without a lowering run on the CPU: counted, and named in a warning for each line that calls one.

`TORCH_TPU_FALLBACK` is `warn` (default), `allow` (no warning) or `error`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu import metrics
from torch_tpu.eager.host import copied_arguments
from torch_tpu.eager.host.copied_arguments import tensors
from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.hlo.strided import shares_elements
from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import Place
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.ops.core.schema import bind, call, signature
from torch_tpu.ops.tracing.cpu_acceptance import on_cpu
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.errors import no_such_tensors
from torch_tpu.tensor.transfer import from_host, host_view, to_host


def policy() -> str:
    """What `TORCH_TPU_FALLBACK` says."""
    chosen = os.environ.get("TORCH_TPU_FALLBACK", "warn")
    if chosen not in ("allow", "warn", "error"):
        raise ValueError(f"TORCH_TPU_FALLBACK={chosen!r}: expected allow, warn or error")
    return chosen


def run_on_cpu(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    """Runs an operator's CPU kernel on host copies; results and written arguments go back to the device.

    Raises:
        NotImplementedError: where `TORCH_TPU_FALLBACK=error`, or there is no CPU kernel either.
    """
    name = func.name()
    shared = any(shares_elements(t.shape, t.stride()) for t in copied_arguments.written_tensors(func, args, kwargs))
    if shared and client().runs:
        place = user_lines.here_or_backward()
        with metrics.waiting("operator on the CPU"):
            return copied_arguments.run(func, args, kwargs, before_writing=lambda: admit(name, reason, place))
    moved: dict[int, torch.Tensor] = {}
    try:
        result = _run(on_cpu(func), args, kwargs, moved, "cpu" if client().runs else "meta")
    except (NotImplementedError, RuntimeError):
        if client().runs:
            raise
        moved.clear()
        result = _run(on_cpu(func), args, kwargs, moved, "cpu")  # it has no meta kernel, or its shapes depend on data
    _check_kind(result, name)
    # What the CPU or the device refuses is no matter of the fallback.
    admit(name, reason, user_lines.here_or_backward())
    if shared:
        return _to_device(
            result, {id(host): t for t in tensors((args, kwargs)) if (host := moved.get(id(t))) is not None}
        )

    originals: dict[int, torch.Tensor] = {}
    for a, value in zip(signature(func).arguments, args, strict=False):
        _write_back(a.is_written, value, moved, originals)
    for a in signature(func).arguments:
        if a.name in kwargs:
            _write_back(a.is_written, kwargs[a.name], moved, originals)
    return _to_device(result, originals)


def admit(name: str, reason: str, place: Place) -> None:
    """Counts an operator that has run on the CPU, and says so.

    Args:
        place: the user's line that called it.

    Raises:
        NotImplementedError: where `TORCH_TPU_FALLBACK=error`.
    """
    chosen = policy()
    if chosen == "error":
        raise NotImplementedError(
            f"{name} can't run on the tpu device (at {user_lines.where(place)}): {reason}. "
            "TORCH_TPU_FALLBACK=error forbids running it on the CPU."
        )
    metrics.note("fallback", name, reason, place)
    if chosen == "warn":
        warn(
            f"{name} runs on the CPU: {reason}. "
            "torch_tpu.metrics.report() counts such calls; TORCH_TPU_FALLBACK=allow silences this.",
            place=place,
        )


def _run(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], moved: dict[int, torch.Tensor], device: str
) -> Any:
    """Runs an operator's CPU kernel on copies, or its meta kernel, which suffices where tensors have no contents."""
    with metrics.waiting("operator on the CPU"):
        host_args = tuple(_moved(v, moved, device) for v in args)
        host_kwargs = {k: _moved(v, moved, device) for k, v in kwargs.items() if k != "pin_memory"}
    return call(func, host_args, host_kwargs)


def as_cpu_raises(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """What the CPU raises for the same call; `error` itself if the CPU accepts it.

    Users know these words, and programs catch these types; PyTorch's meta kernels often use others.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    return cpu_error(func, args, kwargs) or error


def cpu_error(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    before_reading: Callable[[], None] | None = None,
) -> Exception | None:
    """What the CPU raises for a call.

    It is tried on zeros of the same shapes. What these raise may be their own fault (a matrix of zeros has no inverse),
    so the contents have the last word.

    Args:
        before_reading: called before the device's tensors are read.
    """
    func = on_cpu(func)
    error = _trial(func, args, kwargs, _stand_in)
    if error is None:
        return None
    if before_reading is not None:
        before_reading()
    if client().runs:
        return _trial(func, args, kwargs, _copy_of)
    return None if str(error) == "ZeroDivisionError" else error  # there are no contents to ask


def _trial(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Callable[..., Any]
) -> Exception | None:
    """What the CPU raises for a call whose tensors are replaced by some on the host."""
    stand_ins: dict[int, torch.Tensor] = {}
    for argument, value in zip(signature(func).arguments, bind(func, args, kwargs), strict=True):
        if argument.is_written:
            replaced(value, stand_ins, written=True)
    positional = [replaced(v, stand_ins) for v in args]
    named = {k: replaced(v, stand_ins) for k, v in kwargs.items() if k != "pin_memory"}
    try:
        # The trial neither moves the CPU's generator nor warns.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            call(func, positional, named)
    except Exception as known:
        return known.with_traceback(None)
    return None


def _copy_of(value: Any, copies: dict[int, torch.Tensor], *, written: bool = False) -> Any:
    """Arguments with the device's tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = to_host(value) if value.device.type == "tpu" else value.detach().clone()
        return copies[id(value)]
    return _stand_in_of_no_tensor(value, copies, _copy_of, written)


def _stand_in(value: Any, stand_ins: dict[int, torch.Tensor], *, written: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in stand_ins:
            # A large tensor is one element seen many times, which costs nothing, unless it is to be written.
            stand_ins[id(value)] = (
                torch.zeros(value.shape, dtype=value.dtype)
                if written or value.numel() < 2**20
                else torch.zeros((), dtype=value.dtype).expand(value.shape)
            )
        return stand_ins[id(value)]
    return _stand_in_of_no_tensor(value, stand_ins, _stand_in, written)


def _stand_in_of_no_tensor(
    value: Any, stand_ins: dict[int, torch.Tensor], replaced: Callable[..., Any], written: bool
) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)([replaced(v, stand_ins, written=written) for v in value])
    return None if isinstance(value, torch._C.Generator) else value


def _moved(value: Any, moved: dict[int, torch.Tensor], device: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "tpu":
            return value.to("meta") if device == "meta" else value
        if id(value) not in moved:
            moved[id(value)] = to_host(value) if device == "cpu" else host_view(value).to("meta")
        return moved[id(value)]
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(v, moved, device) for v in value])
    if isinstance(value, torch._C.Generator):
        return None
    return value


def _write_back(written: bool, value: Any, moved: dict[int, torch.Tensor], originals: dict[int, torch.Tensor]) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _write_back(written, item, moved, originals)
    elif isinstance(value, torch.Tensor) and id(value) in moved:
        host = moved[id(value)]
        originals[id(host)] = value
        if written:
            if host.device.type == "meta":
                host = torch.zeros((), dtype=host.dtype).expand(host.shape)
            if value.shape != host.shape:
                value.resize_(host.shape)
            HANDWRITTEN["copy_"](value, host)


def _check_kind(result: Any, name: str) -> None:
    """Raises for tensors that the device has not."""
    if isinstance(result, (list, tuple)):
        for r in result:
            _check_kind(r, name)
    elif isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            raise no_such_tensors(result.dtype if result.is_quantized else result.layout, name)
        if result.is_nested:
            raise no_such_tensors("strided nested", name)


def _to_device(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        original = originals.get(id(result))
        if original is not None:
            return original
        if result.device.type == "meta":
            return torch.zeros_like(result, device="tpu")
        return from_host(result)
    if isinstance(result, (list, tuple)):
        return type(result)([_to_device(r, originals) for r in result])
    return result
