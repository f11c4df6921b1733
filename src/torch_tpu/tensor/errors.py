"""Errors in PyTorch's words, and where in the user's program they arose."""

from __future__ import annotations

import torch

from torch_tpu.metrics import user_lines
from torch_tpu.runtime import memory_counts
from torch_tpu.runtime.client import client, client_errors


def user_line() -> str:
    """`file:line` of the user's program that is running now."""
    return user_lines.where(user_lines.here_or_backward())


def device_mismatch(other: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, tpu:0 and "
        f"{other.device}! Move the other tensor with .to('tpu')."
    )


# What serves in place of tensors that the device has not.
_SPARSE = "keep it on the CPU, or make it dense there with .to_dense(); layers give dense gradients with sparse=False"
_INSTEAD = {
    "nested": "torch.nested.nested_tensor(..., layout=torch.jagged) works here; else keep it on the CPU, or pad it",
    "quantized": "keep it on the CPU, or hold its integers and scales as plain tensors",
    "sparse": _SPARSE,
    "mkldnn": "the layout is the CPU's own; use a strided tensor",
}


def no_such_tensors(kind: torch.layout | torch.dtype | str, operator: str = "") -> NotImplementedError:
    """For a layout, quantized dtype or other kind of tensor that the device has not.

    Args:
        operator: the name of what would make one.
    """
    name = "quantized" if isinstance(kind, torch.dtype) else str(kind)
    instead = next(text for known, text in _INSTEAD.items() if known in name)
    return NotImplementedError(
        f"the tpu device has no {kind} tensors{operator and f' ({operator}, at {user_line()})'}: {instead}."
    )


def out_of_memory(why: str, place: str = "") -> torch.OutOfMemoryError:
    """An error in words by which libraries know that a smaller batch may do: they look for " out of memory."."""
    memory_counts.counter.out_of_memory += 1
    return torch.OutOfMemoryError(
        f"TPU out of memory. Too much was asked for {place or f'at {user_line()}'}: {why}. "
        f"{memory_counts.allocated() / 2**20:,.1f} MiB are allocated (peak {memory_counts.peak() / 2**20:,.1f}); "
        f"the largest: {'; '.join(client().largest_live(5)) or 'none'}. torch.tpu.memory_summary() has the counts."
    )


def check_fits(nbytes: int) -> None:
    """Raises for more memory than the device has.

    XLA would say so only when it makes the value: in fused eager later or, if nobody reads it, never. On a host that
    promises more memory than it has, the process would be ended for it.
    """
    total = client().total_memory
    if nbytes > total:
        raise out_of_memory(f"a value of {nbytes / 2**30:,.1f} GiB, where the device has {total / 2**30:,.1f}")


def translate(error: Exception, place: str = "") -> Exception:
    """A PJRT error as PyTorch would raise it.

    Args:
        place: where it arose, if that is not where the program is now.
    """
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return out_of_memory(f"XLA said {text.splitlines()[0][:300] if text else 'nothing'!r}", place)
    place = place or f"at {user_line()}"
    if isinstance(error, client_errors()):
        return RuntimeError(f"the tpu device failed {place}: {text[:2000]}")
    return error
