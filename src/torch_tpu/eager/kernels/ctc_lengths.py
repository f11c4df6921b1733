"""CTC's lengths come as lists of numbers; here they become tensors, so that they are data, and targets are padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.eager.dispatch.operator import as_program
from torch_tpu.eager.kernel_table import kernel

aten = torch.ops.aten


def _padded(targets: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Concatenated targets as (N, S); the entries after a target's end are any of the others."""
    if targets.dim() == 2:
        return targets
    size = max(lengths, default=0)
    if not targets.numel():
        return targets.new_zeros(len(lengths), size)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    places = starts[:, None] + torch.arange(size)
    return torch.take(targets, places.clamp(max=targets.numel() - 1).to(targets.device))


def _check(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: Sequence[int], lengths: Sequence[int], blank: int
) -> None:
    times, batch, classes = log_probs.shape
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    if len(inputs) != batch:
        raise RuntimeError("input_lengths must be of size batch_size")
    if len(lengths) != batch:
        raise RuntimeError("target_lengths must be of size batch_size")
    if min(inputs, default=0) < 0 or max(inputs, default=0) > times:
        raise RuntimeError(f"Expected input_lengths to have value at most {times}, but got value {max(inputs)}")
    if min(lengths, default=0) < 0:
        raise RuntimeError(f"Expected target_lengths to have value at least 0, but got value {min(lengths)}")
    if targets.dim() == 1 and targets.shape[0] < sum(lengths):
        raise RuntimeError(f"Expected targets to have at least {sum(lengths)} entries, but got {targets.shape[0]}")
    if targets.dim() == 2 and (targets.shape[0] != batch or targets.shape[1] < max(lengths, default=0)):
        raise RuntimeError(
            f"Expected tensor to have size at least {max(lengths, default=0)} at dimension 1, but got size "
            f"{targets.shape[1]} for argument #2 'targets'"
        )


def _lengths(lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int64, device=like.device)


@kernel("_ctc_loss")
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(log_probs, targets, input_lengths, target_lengths, blank)
    result: tuple[torch.Tensor, torch.Tensor] = as_program(aten._ctc_loss.Tensor)(
        log_probs,
        _padded(targets, target_lengths),
        _lengths(input_lengths, log_probs),
        _lengths(target_lengths, log_probs),
        blank,
        zero_infinity,
    )
    return result


@kernel("_ctc_loss_backward")
def ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    neg_log_likelihood: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    result: torch.Tensor = as_program(aten._ctc_loss_backward.Tensor)(
        grad,
        log_probs,
        _padded(targets, target_lengths),
        _lengths(input_lengths, log_probs),
        _lengths(target_lengths, log_probs),
        neg_log_likelihood,
        log_alpha,
        blank,
        zero_infinity,
    )
    return result
