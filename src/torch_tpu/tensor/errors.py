"""Errors in PyTorch's words, and where in the user's program they arose."""

from __future__ import annotations

import torch

from torch_tpu.metrics import places
from torch_tpu.runtime import memory
from torch_tpu.runtime.client import client, client_errors


def user_line() -> str:
    """`file:line` of the user's program that is running now."""
    return places.where(places.here_or_backward())


def device_mismatch(other: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, tpu:0 and "
        f"{other.device}! Move the other tensor with .to('tpu')."
    )


def translate(error: Exception, place: str = "") -> Exception:
    """A PJRT error as PyTorch would raise it.

    Args:
        place: where it arose, if that is not where the program is now.
    """
    text = str(error)
    place = place or f"at {user_line()}"
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        memory.counter.out_of_memory += 1
        held = memory.allocated() / 2**20
        return torch.OutOfMemoryError(
            f"TPU out of memory {place}. {held:,.1f} MiB are allocated (peak {memory.peak() / 2**20:,.1f}); "
            f"the largest: {'; '.join(client().largest_live(5)) or 'none'}. torch.tpu.memory_stats() has the counts. "
            f"XLA said: {text.splitlines()[0][:300]}"
        )
    if isinstance(error, client_errors()):
        return RuntimeError(f"the tpu device failed {place}: {text[:2000]}")
    return error
