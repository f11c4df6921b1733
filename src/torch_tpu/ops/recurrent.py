"""Recurrent cells, and whole layers of them over a sequence as one loop: private operators `tpu::rnn_layer(_backward)`.

A layer's products with the input don't depend on the recurrence: they are one product for all steps, before the loop
(forward) or after it (backward). `eager.kernels.recurrent_layers` puts layers together to nn.LSTM, nn.GRU and nn.RNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import decompose, lower
from torch_tpu.ops.matmul import dot
from torch_tpu.ops.normalization import widen
from torch_tpu.ops.private_operators import SAVED_GATES

States = list[Array]
Tensor = torch.Tensor


def _split(gates: Array, count: int) -> list[Array]:
    width = gates.shape[-1] // count
    return [hlo.slice_in_dim(gates, i * width, (i + 1) * width, dim=-1) for i in range(count)]


def _join(*parts: Array) -> Array:
    return hlo.concatenate(parts, -1)


# --- one step and its gradient -----------------------------------------------------------------------------------
# A step gets the two products (with biases) and the states; it returns new states and what its gradient needs. A
# gradient returns that of both products and, for each state before the step, the part that doesn't go through them.


def lstm_step(x: Array, hidden: Array, states: States) -> tuple[States, States]:
    i, f, g, o = _split(x + hidden, 4)
    i, f, g, o = hlo.logistic(i), hlo.logistic(f), hlo.tanh(g), hlo.logistic(o)
    c = f * states[1] + i * g
    return [o * hlo.tanh(c), c], [_join(i, f, g, o)]


def lstm_gradient(grads: States, saved: States, before: States, after: States) -> tuple[Array, Array, States]:
    i, f, g, o = _split(saved[0], 4)
    squashed = hlo.tanh(after[1])
    grad_c = grads[1] + grads[0] * o * (1 - squashed * squashed)
    gates = _join(
        grad_c * g * i * (1 - i),
        grad_c * before[1] * f * (1 - f),
        grad_c * i * (1 - g * g),
        grads[0] * squashed * o * (1 - o),
    )
    return gates, gates, [hlo.full_like(grads[0], 0), grad_c * f]


def gru_step(x: Array, hidden: Array, states: States) -> tuple[States, States]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = _split(x, 3), _split(hidden, 3)
    r, z = hlo.logistic(x_r + h_r), hlo.logistic(x_z + h_z)
    n = hlo.tanh(x_n + r * h_n)
    return [(states[0] - n) * z + n], [_join(r, z, n, h_n)]


def gru_gradient(grads: States, saved: States, before: States, after: States) -> tuple[Array, Array, States]:
    r, z, n, h_n = _split(saved[0], 4)
    grad_n = grads[0] * (1 - z) * (1 - n * n)
    grad_r = grad_n * h_n * r * (1 - r)
    grad_z = grads[0] * (before[0] - n) * z * (1 - z)
    return _join(grad_r, grad_z, grad_n), _join(grad_r, grad_z, grad_n * r), [grads[0] * z]


def tanh_step(x: Array, hidden: Array, states: States) -> tuple[States, States]:
    return [hlo.tanh(x + hidden)], []


def tanh_gradient(grads: States, saved: States, before: States, after: States) -> tuple[Array, Array, States]:
    gates = grads[0] * (1 - after[0] * after[0])
    return gates, gates, [hlo.full_like(gates, 0)]


def relu_step(x: Array, hidden: Array, states: States) -> tuple[States, States]:
    return [hlo.maximum(x + hidden, 0)], []


def relu_gradient(grads: States, saved: States, before: States, after: States) -> tuple[Array, Array, States]:
    gates = hlo.select(after[0] > 0, grads[0], 0)
    return gates, gates, [hlo.full_like(gates, 0)]


class Cell(NamedTuple):
    """A kind of recurrence.

    Attributes:
        gates, saved: widths, in units of the hidden size, of the products and of what a step saves.
    """

    step: Callable[[Array, Array, States], tuple[States, States]]
    gradient: Callable[[States, States, States, States], tuple[Array, Array, States]]
    gates: int
    saved: int


CELLS = {
    "lstm": Cell(lstm_step, lstm_gradient, 4, SAVED_GATES["lstm"]),
    "gru": Cell(gru_step, gru_gradient, 3, SAVED_GATES["gru"]),
    "rnn_tanh": Cell(tanh_step, tanh_gradient, 1, SAVED_GATES["rnn_tanh"]),
    "rnn_relu": Cell(relu_step, relu_gradient, 1, SAVED_GATES["rnn_relu"]),
}

# --- single cells (nn.LSTMCell, nn.GRUCell) ----------------------------------------------------------------------


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + hlo.convert(bias, x.dtype)


# Without biases PyTorch's meta kernel of `_thnn_fused_lstm_cell` fails, so the lowering is that of a private operator.


@decompose("_thnn_fused_lstm_cell")
def fused_lstm_cell(
    x: Tensor, hidden: Tensor, c: Tensor, x_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = x + hidden
    if x_bias is not None and hidden_bias is not None:
        gates = gates + x_bias + hidden_bias
    return torch.ops.tpu.lstm_cell(gates, c)


@lower("tpu::lstm_cell")
def lstm_cell(gates: Array, c: Array) -> list[Array]:
    wide_gates, wide_c = widen(gates, c)
    states, saved = lstm_step(wide_gates, hlo.full_like(wide_gates, 0), [wide_c, wide_c])
    return [hlo.convert(a, gates.dtype) for a in (*states, *saved)]


@lower("_thnn_fused_lstm_cell_backward_impl")
def fused_lstm_cell_backward(
    grad_h: Array | None, grad_c: Array | None, c: Array, new_c: Array, workspace: Array, has_bias: bool
) -> list[Array | None]:
    wide_c, wide_new_c, workspace, *given = widen(c, new_c, workspace, grad_h, grad_c)
    grads = [hlo.full_like(wide_c, 0) if g is None else g for g in given]
    gates, _, (_, before) = lstm_gradient(grads, [workspace], [wide_c, wide_c], [wide_new_c, wide_new_c])
    return [gates, before, structured.reduce_sum(gates, [0]) if has_bias else None]


@lower("_thnn_fused_gru_cell")
def fused_gru_cell(
    x: Array, hidden: Array, h: Array, x_bias: Array | None = None, hidden_bias: Array | None = None
) -> list[Array]:
    wide_x, wide_hidden, wide_h = widen(x, hidden, h)
    (new,), (saved,) = gru_step(_plus(wide_x, x_bias), _plus(wide_hidden, hidden_bias), [wide_h])
    return [hlo.convert(a, x.dtype) for a in (new, _join(saved, wide_h))]


@lower("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(grad: Array, workspace: Array, has_bias: bool) -> list[Array]:
    wide, workspace = widen(grad, workspace)
    *_, h = _split(workspace, 5)
    saved = hlo.slice_in_dim(workspace, 0, 4 * h.shape[-1], dim=-1)
    x_gates, hidden_gates, (before,) = gru_gradient([wide], [saved], [h], [h])
    sums = [structured.reduce_sum(g, [0]) if has_bias else hlo.zeros((0,), g.dtype) for g in (x_gates, hidden_gates)]
    return [hlo.convert(a, grad.dtype) for a in (x_gates, hidden_gates, before, *sums)]


# --- layers ------------------------------------------------------------------------------------------------------


def _at(x: Array, step: Array) -> Array:
    zero = hlo.constant(0, torch.int32)
    return hlo.squeeze(hlo.dynamic_slice(x, [step, *[zero] * (x.ndim - 1)], [1, *x.shape[1:]]), 0)


def _set_at(x: Array, value: Array, step: Array) -> Array:
    zero = hlo.constant(0, torch.int32)
    return hlo.dynamic_update_slice(x, hlo.expand_dims(hlo.convert(value, x.dtype), 0), [step, *[zero] * (x.ndim - 1)])


def _at_wide(x: Array, step: Array) -> Array:
    return widen(_at(x, step))[0]


def _step_of(i: Array, steps: int, reverse: bool) -> Array:
    return steps - 1 - i if reverse else i


def _active(step: Array, lengths: Array) -> Array:
    return hlo.expand_dims(step < hlo.convert(lengths, torch.int32), 1)


def _empty(dtype: torch.dtype) -> Array:
    return hlo.zeros((0,), dtype)


@lower("tpu::rnn_layer")
def rnn_layer(
    x: Array,
    h: Array,
    c: Array | None,
    w_ih: Array,
    w_hh: Array,
    b_ih: Array | None,
    b_hh: Array | None,
    lengths: Array | None,
    mode: str,
    reverse: bool,
) -> list[Array]:
    cell, steps = CELLS[mode], x.shape[0]
    products = _plus(dot(x, w_ih, ([2], [1])), b_ih)
    states = [s for s in widen(h, c) if s is not None]
    batch, width = h.shape
    histories = [hlo.zeros((steps, batch, width), x.dtype) for _ in states]
    if cell.saved:
        histories.append(hlo.zeros((steps, batch, cell.saved * width), x.dtype))

    def body(i: Array, *carried: Array) -> list[Array]:
        step = _step_of(i, steps, reverse)
        states, histories = list(carried[: len(states_in)]), carried[len(states_in) :]
        hidden = _plus(dot(hlo.convert(states[0], x.dtype), w_hh, ([1], [1])), b_hh)
        new, saved = cell.step(_at(products, step), hidden, states)
        if lengths is not None:
            new = [hlo.select(_active(step, lengths), n, old) for n, old in zip(new, states, strict=True)]
        return [*new, *(_set_at(t, v, step) for t, v in zip(histories, [*new, *saved], strict=True))]

    states_in = states
    results = structured.fori_loop(steps, body, [*states, *histories])
    last, histories = results[: len(states)], results[len(states) :]
    saved = histories[-1] if cell.saved else _empty(x.dtype)
    if c is None:
        return [histories[0], saved, _empty(x.dtype), last[0], _empty(x.dtype)]
    return [histories[0], saved, histories[1], *last]


@lower("tpu::rnn_layer_backward")
def rnn_layer_backward(
    grad_output: Array | None,
    grad_h: Array | None,
    grad_c: Array | None,
    x: Array,
    h: Array,
    c: Array | None,
    w_ih: Array,
    w_hh: Array,
    b_ih: Array | None,
    b_hh: Array | None,
    lengths: Array | None,
    output: Array,
    saved: Array,
    cells: Array,
    mode: str,
    reverse: bool,
) -> list[Array]:
    cell, steps = CELLS[mode], x.shape[0]
    batch, width = h.shape
    after, initial = ([output], [h]) if c is None else ([output, cells], [h, c])
    before = [_shifted(a, s, reverse) for a, s in zip(after, initial, strict=True)]
    given = (grad_h, grad_c)[: len(after)]
    grads_in = [hlo.full_like(widen(h)[0], 0) if g is None else widen(g)[0] for g in given]
    gates = hlo.zeros((steps, batch, cell.gates * width), x.dtype)

    def body(i: Array, *carried: Array) -> list[Array]:
        step = _step_of(i, steps, not reverse)
        grads, tables = list(carried[: len(after)]), carried[len(after) :]
        if grad_output is not None:
            grads[0] = grads[0] + _at_wide(grad_output, step)
        x_gates, hidden_gates, through = cell.gradient(
            grads,
            [_at_wide(saved, step)] if cell.saved else [],
            *([_at_wide(a, step) for a in s] for s in (before, after)),
        )
        if lengths is not None:
            active = _active(step, lengths)
            x_gates, hidden_gates = (hlo.select(active, g, 0) for g in (x_gates, hidden_gates))
            through = [hlo.select(active, new, old) for new, old in zip(through, grads, strict=True)]
        through[0] = through[0] + dot(hlo.convert(hidden_gates, x.dtype), w_hh, ([1], [0]))
        new_gates = [x_gates, hidden_gates] if mode == "gru" else [x_gates]
        return [*through, *(_set_at(t, g, step) for t, g in zip(tables, new_gates, strict=True))]

    tables = [gates, gates] if mode == "gru" else [gates]
    results = structured.fori_loop(steps, body, [*grads_in, *tables])
    grad_states, (x_gates, *others) = results[: len(after)], results[len(after) :]
    hidden_gates = others[0] if others else x_gates
    over_steps = [0, 1]
    return [
        dot(x_gates, w_ih, ([2], [0])),
        grad_states[0],
        _empty(x.dtype) if c is None else grad_states[1],
        dot(x_gates, x, (over_steps, over_steps)),
        dot(hidden_gates, before[0], (over_steps, over_steps)),
        _bias_gradient(x_gates, b_ih),
        _bias_gradient(hidden_gates, b_hh),
    ]


def _bias_gradient(gates: Array, bias: Array | None) -> Array:
    return _empty(gates.dtype) if bias is None else structured.reduce_sum(widen(gates)[0], [0, 1])


def _shifted(history: Array, initial: Array, reverse: bool) -> Array:
    """The states before each step, from those after each step."""
    first = hlo.expand_dims(initial, 0)
    if reverse:
        return hlo.concatenate([hlo.slice_in_dim(history, 1, history.shape[0]), first], 0)
    return hlo.concatenate([first, hlo.slice_in_dim(history, 0, history.shape[0] - 1)], 0)
