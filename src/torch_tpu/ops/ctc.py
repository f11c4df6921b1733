"""Connectionist temporal classification (Graves et al., ICML 2006): the loss and its derivative as loops over time.

Targets come padded, (N, S). A path goes through 2·S + 1 states: blank, label, blank, …, blank. `alpha` is the
logarithm of the probability of all path beginnings that end in a state, `beta` that of all path ends from it; both
include the state's own emission.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import lower
from torch_tpu.ops.indexing import added, elements, read


class _States:
    """The states of a batch of targets.

    Attributes:
        labels: the class each state emits (N, L).
        skips: whether a path may come to a state from two states before (N, L).
        ends: whether a path may end in a state (N, L).
        emissions: log-probability of each state at each time (T, N, L).
    """

    def __init__(self, log_probs: Array, targets: Array, target_lengths: Array, blank: int) -> None:
        batch, size = targets.shape
        labels = hlo.convert(targets, torch.int64)
        blanks = hlo.full((batch, size + 1, 1), blank, torch.int64)
        pairs = hlo.concatenate([hlo.slice_in_dim(blanks, 0, size, dim=1), hlo.expand_dims(labels, 2)], 2)
        tail = hlo.reshape(hlo.slice_in_dim(blanks, size, size + 1, dim=1), (batch, 1))
        self.labels = hlo.concatenate([hlo.reshape(pairs, (batch, 2 * size)), tail], 1)
        before = shifted(self.labels, 2, blank)
        self.skips = self.labels.ne(blank) & self.labels.ne(before)
        self.index = hlo.iota(self.labels.shape, 1, torch.int64)
        last = hlo.expand_dims(hlo.convert(target_lengths, torch.int64) * 2, 1)
        self.ends = self.index.eq(last) | self.index.eq(last - 1)
        every = hlo.broadcast_to(self.labels, (log_probs.shape[0], *self.labels.shape))
        self.emissions = read(log_probs, elements(log_probs.shape, 2, every))


def shifted(x: Array, by: int, fill: float) -> Array:
    """Entry i of a row is what entry i - by was."""
    if abs(by) >= x.shape[1]:
        return hlo.full_like(x, fill)
    return hlo.pad(x, fill, [0, by], [0, -by])


def _row(table: Array, t: Array) -> Array:
    zero = hlo.full_like(t, 0)
    return hlo.reshape(hlo.dynamic_slice(table, [t, zero, zero], [1, *table.shape[1:]]), table.shape[1:])


def _with_row(table: Array, t: Array, row: Array) -> Array:
    zero = hlo.full_like(t, 0)
    return hlo.dynamic_update_slice(table, hlo.expand_dims(row, 0), [t, zero, zero])


def _log_sum(*terms: Array) -> Array:
    """log of the sum of exponentials; -∞ where all terms are."""
    top = terms[0]
    for term in terms[1:]:
        top = hlo.maximum(top, term)
    safe = hlo.select(top.eq(-math.inf), 0, top)
    total = hlo.exp(terms[0] - safe)
    for term in terms[1:]:
        total = total + hlo.exp(term - safe)
    return hlo.log(total) + safe


def _moved(x: Array, skips: Array, direction: int) -> Array:
    """Log-probability of coming into each state by one step along (1) or back (-1) from the states of `x`."""
    two = hlo.select(skips, shifted(x, 2, -math.inf), -math.inf) if direction > 0 else x
    if direction < 0:
        two = shifted(hlo.select(skips, x, -math.inf), -2, -math.inf)
    return _log_sum(x, shifted(x, direction, -math.inf), two)


@lower("_ctc_loss.Tensor")
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """The loss of each sequence (N) and `alpha` (N, T, L)."""
    states = _States(log_probs, targets, target_lengths, blank)
    times = log_probs.shape[0]
    nowhere = hlo.full(states.labels.shape, -math.inf, log_probs.dtype)

    def forward(t: Array, alpha: Array, table: Array, final: Array) -> list[Array]:
        emission = _row(states.emissions, t)
        begun = hlo.select(states.index < 2, emission, nowhere)
        alpha = hlo.select(hlo.broadcast_to(t.eq(0), alpha.shape), begun, _moved(alpha, states.skips, 1) + emission)
        ended = hlo.expand_dims(input_lengths, 1).eq(hlo.convert(t, input_lengths.dtype) + 1)
        return [alpha, _with_row(table, t, alpha), hlo.select(ended, alpha, final)]

    table = hlo.full((times, *nowhere.shape), -math.inf, log_probs.dtype)
    # Without any input, only the empty target has a path.
    empty = hlo.select(states.index.eq(0) & states.ends, 0, nowhere)
    _, table, final = structured.fori_loop(times, forward, [nowhere, table, empty])
    top = structured.reduce_max(hlo.select(states.ends, final, -math.inf), [1])
    safe = hlo.select(top.eq(-math.inf), 0, top)
    mass = structured.reduce_sum(hlo.select(states.ends, hlo.exp(final - hlo.expand_dims(safe, 1)), 0), [1])
    return -(hlo.log(mass) + safe), hlo.transpose(table, [1, 0, 2])


@lower("_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Array,
    target_lengths: Array,
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool = False,
) -> Array:
    """p minus the posterior probability of each class, times the derivative of the loss."""
    states = _States(log_probs, targets, target_lengths, blank)
    times, batch, classes = log_probs.shape
    alphas = hlo.transpose(log_alpha, [1, 0, 2])
    nowhere = hlo.full(states.labels.shape, -math.inf, log_probs.dtype)
    loss = hlo.expand_dims(neg_log_likelihood, 1)

    def backward(i: Array, beta: Array, table: Array) -> list[Array]:
        t = times - 1 - i
        emission = _row(states.emissions, t)
        last = hlo.expand_dims(input_lengths, 1).eq(hlo.convert(t, input_lengths.dtype) + 1)
        begun = hlo.select(states.ends, emission, nowhere)
        beta = hlo.select(last, begun, _moved(beta, states.skips, -1) + emission)
        posterior = hlo.exp(_row(alphas, t) + beta - emission + loss)
        return [beta, _with_row(table, t, posterior)]

    table = hlo.zeros((times, *nowhere.shape), log_probs.dtype)
    _, posterior = structured.fori_loop(times, backward, [nowhere, table])
    every = hlo.broadcast_to(states.labels, posterior.shape)
    occupied = added(hlo.full_like(log_probs, 0), elements(log_probs.shape, 2, every), posterior)
    slope = (hlo.exp(log_probs) - occupied) * hlo.reshape(grad, (1, batch, 1))
    if zero_infinity:
        slope = hlo.select(hlo.reshape(neg_log_likelihood, (1, batch, 1)).eq(math.inf), 0, slope)
    running = hlo.iota((times, 1), 0, input_lengths.dtype) < hlo.expand_dims(input_lengths, 0)
    return hlo.select(hlo.expand_dims(running, 2), slope, hlo.zeros((times, batch, classes), log_probs.dtype))
