"""Operators without a lowering run on the CPU: counted, and named in a warning for each line that calls one.

`TORCH_TPU_FALLBACK` is `warn` (default), `allow` (no warning) or `error`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu import metrics
from torch_tpu.eager.host import copied_arguments
from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.hlo.strided import shares_elements
from torch_tpu.metrics import user_lines
from torch_tpu.metrics.user_lines import CallSite
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.ops.core.argument_mapper import cpu_error_with, mapped, mapped_back, once, tensors
from torch_tpu.ops.core.schema import call
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
    written = list(copied_arguments.written_tensors(func, args, kwargs))
    shared = any(shares_elements(t.shape, t.stride()) for t in written)
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
    if not shared:
        for t in written:
            _write_back(t, moved[id(t)])
    originals = {id(moved[id(t)]): t for t in tensors((args, kwargs)) if t.is_tpu}
    return mapped_back(result, originals, _on_device)


def _write_back(t: torch.Tensor, host: torch.Tensor) -> None:
    if host.device.type == "meta":
        host = torch.zeros((), dtype=host.dtype).expand(host.shape)
    if t.shape != host.shape:
        t.resize_(host.shape)
    HANDWRITTEN["copy_"](t, host)


def admit(name: str, reason: str, place: CallSite) -> None:
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

    def copy(t: torch.Tensor) -> torch.Tensor:
        if t.device.type != "tpu":
            return t.to("meta") if device == "meta" else t
        return to_host(t) if device == "cpu" else host_view(t).to("meta")

    with metrics.waiting("operator on the CPU"):
        host_args, host_kwargs = mapped((args, kwargs), once(copy, moved), torch.device(device))
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
    written = {id(t) for t in copied_arguments.written_tensors(func, args, kwargs)}

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        # A large tensor is one element seen many times, which costs nothing, unless it is to be written.
        if id(t) in written or t.numel() < 2**20:
            return torch.zeros(t.shape, dtype=t.dtype)
        return torch.zeros((), dtype=t.dtype).expand(t.shape)

    def copy(t: torch.Tensor) -> torch.Tensor:
        return to_host(t) if t.device.type == "tpu" else t.detach().clone()

    error = cpu_error_with(func, args, kwargs, stand_in)
    if error is None:
        return None
    if before_reading is not None:
        before_reading()
    if client().runs:
        return cpu_error_with(func, args, kwargs, copy)
    return None if str(error) == "ZeroDivisionError" else error  # there are no contents to ask


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


def _on_device(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(t, device="tpu") if t.device.type == "meta" else from_host(t)
