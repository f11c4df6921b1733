"""The device's private operators `tpu::…`: their schemas, and the shapes of their results where PyTorch has to know.

Kernels and decompositions call them, fake tensors ask for their shapes; their lowerings stand in the families.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

# What a step of a recurrent layer saves for its gradient, in widths of the state.
SAVED_GATES = {"lstm": 4, "gru": 4, "rnn_tanh": 0, "rnn_relu": 0}

_library = torch.library.Library("tpu", "FRAGMENT")
for _schema in (
    "range(SymInt length, Scalar start, Scalar step, *, ScalarType dtype) -> Tensor",
    # Results padded to the most that data may ask for, and how much of them counts.
    "nonzero_padded(Tensor x) -> (Tensor, Tensor)",
    "masked_select_padded(Tensor x, Tensor mask) -> (Tensor, Tensor)",
    "unique_padded(Tensor x, bool sort, bool inverse, bool counts) -> (Tensor, Tensor, Tensor, Tensor)",
    "unique_slices_padded(Tensor x, int dim, bool sort) -> (Tensor, Tensor, Tensor, Tensor)",
    "least_and_greatest(Tensor x) -> Tensor",
    "least_and_sum(Tensor x) -> Tensor",
    "bincount_sized(Tensor x, Tensor? weights, int size) -> Tensor",
    "repeat_interleave_sized(Tensor repeats, int size, bool exact) -> Tensor",
    "grouped_mm(Tensor a, Tensor b, Tensor? offs, ScalarType out_dtype) -> Tensor",
    "lstm_cell(Tensor gates, Tensor c) -> (Tensor, Tensor, Tensor)",
    # `lengths`, where given, is how many steps of each sequence count; in the others its states stay.
    # Results: the state h after each step, what the steps saved, c after each step (LSTM), the last h, the last c.
    "rnn_layer(Tensor x, Tensor h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? lengths,"
    " str mode, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "rnn_layer_backward(Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h, Tensor? c,"
    " Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? lengths, Tensor output, Tensor saved,"
    " Tensor cells, str mode, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(_schema)


@torch.library.impl(_library, "grouped_mm", "Meta")
def _shape(a: Tensor, b: Tensor, offs: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    groups = [offs.shape[0]] if offs is not None and a.dim() == b.dim() == 2 else []
    batch = a.shape[:1] if a.dim() == b.dim() == 3 else groups
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype)


@torch.library.impl(_library, "rnn_layer", "Meta")
def _layer_shapes(x: Tensor, h: Tensor, c: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, mode, _reverse = rest
    width = SAVED_GATES[mode] * h.shape[-1]
    return (
        x.new_empty((x.shape[0], *h.shape)),
        x.new_empty((x.shape[0], h.shape[0], width) if width else (0,)),
        x.new_empty((0,) if c is None else (x.shape[0], *c.shape)),
        x.new_empty(h.shape),
        x.new_empty((0,) if c is None else c.shape),
    )


@torch.library.impl(_library, "rnn_layer_backward", "Meta")
def _layer_gradient_shapes(*args: Any) -> tuple[Tensor, ...]:
    """Of the gradients of x, h, c, w_ih, w_hh, b_ih, b_hh, which come after the three incoming ones."""
    x = args[3]
    return tuple(x.new_empty((0,) if t is None else t.shape) for t in args[3:10])
