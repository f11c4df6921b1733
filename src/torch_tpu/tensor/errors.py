"""Errors in PyTorch's words, and where in the user's program they arose."""

from __future__ import annotations

import torch

from torch_tpu.metrics import user_lines
from torch_tpu.runtime import memory_counts
from torch_tpu.runtime.client import client_errors
from torch_tpu.runtime.process_client import client


def user_line() -> str:
    """`file:line` of the user's program that is running now."""
    return user_lines.where(user_lines.here_or_backward())


def device_mismatch(other: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, tpu:0 and "
        f"{other.device}! Move the other tensor with .to('tpu')."
    )


# What to use instead of tensors that the device does not have.
_SPARSE = "keep it on the CPU, or make it dense there with .to_dense(). Layers have dense gradients with sparse=False"
_INSTEAD = {
    "nested": "torch.nested.nested_tensor(..., layout=torch.jagged) works here; or keep it on the CPU, or pad it",
    "quantized": "keep it on the CPU, or store its integers and scales as ordinary tensors",
    "sparse": _SPARSE,
    "mkldnn": "this layout exists only on the CPU; use a strided tensor",
}


def no_such_tensors(kind: torch.layout | torch.dtype | str, operator: str = "") -> NotImplementedError:
    """The error for a layout, quantized dtype or other kind of tensor that the device does not have.

    Args:
        operator: the name of what would make one.
    """
    name = "quantized" if isinstance(kind, torch.dtype) else str(kind)
    instead = next(text for known, text in _INSTEAD.items() if known in name)
    return NotImplementedError(
        f"the tpu device has no {kind} tensors{operator and f' ({operator}, at {user_line()})'}: {instead}."
    )


def out_of_memory(why: str, place: str = "") -> torch.OutOfMemoryError:
    """An error that libraries recognise by the text " out of memory.": they then try a smaller batch."""
    memory_counts.counter.out_of_memory += 1
    return torch.OutOfMemoryError(
        f"TPU out of memory. An allocation failed {place or f'at {user_line()}'}: {why}. "
        f"{memory_counts.allocated() / 2**20:,.1f} MiB are allocated (peak {memory_counts.peak() / 2**20:,.1f}); "
        f"the largest: {'; '.join(client().largest_live(5)) or 'none'}. torch.tpu.memory_summary() has the counts."
    )


def check_fits(nbytes: int) -> None:
    """Raises for more memory than the device has.

    XLA would find out only when it makes the value: in fused eager later or, if nobody reads it, never. A host that
    overcommits memory would end the process.
    """
    total = client().total_memory
    if nbytes > total:
        raise out_of_memory(f"a tensor of {nbytes / 2**30:,.1f} GiB on a device of {total / 2**30:,.1f} GiB")


def translate(error: Exception, place: str = "") -> Exception:
    """A PJRT error as PyTorch would raise it.

    Args:
        place: where it arose, if that is not where the program is now.
    """
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return out_of_memory(f"XLA reported {text.splitlines()[0][:300] if text else 'nothing'!r}", place)
    place = place or f"at {user_line()}"
    if isinstance(error, client_errors()):
        return RuntimeError(f"the tpu device failed {place}: {text[:2000]}")
    return error
