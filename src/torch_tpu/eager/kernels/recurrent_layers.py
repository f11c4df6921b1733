"""nn.LSTM, nn.GRU and nn.RNN: each layer and direction is one compiled loop forward and one backward.

Registered at the autograd key as well as the device's: below it, PyTorch's composite has long taken the operation
apart into one cell per step. Inference mode skips the autograd key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey

import torch_tpu.ops.private_operators  # noqa: F401  (defines those of recurrent layers)
from torch_tpu.eager.kernels.recurrent_gradient import differentiable_gradient

Tensor = torch.Tensor
_library = torch.library.Library("aten", "IMPL")


class Layer(torch.autograd.Function):
    """One layer in one direction: (output, last h, last c) of an input of (steps, batch, width)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.tpu.rnn_layer(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.mode, ctx.reverse = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[:3])
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, _: Any, __: Any, grad_h: Tensor | None, grad_c: Tensor | None
    ) -> Any:
        *tensors, output, saved, cells = ctx.saved_tensors
        if torch.is_grad_enabled():
            incoming = (grad_output, grad_h, grad_c)
            return (*differentiable_gradient(incoming, tensors, ctx.mode, ctx.reverse), None, None, None)
        gradients = torch.ops.tpu.rnn_layer_backward(
            grad_output, grad_h, grad_c, *tensors, output, saved, cells, ctx.mode, ctx.reverse
        )
        missing = [t is None for t in tensors[:7]]
        return (*(None if gone else g for g, gone in zip(gradients, missing, strict=True)), None, None, None)


def _run(
    mode: str,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """All layers of a (steps, batch, width) input; and the last states, one (layers · directions, …) tensor each."""
    directions, per_layer = (2 if bidirectional else 1), (4 if has_biases else 2)
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            weights = list(params[i * per_layer : (i + 1) * per_layer]) + [None] * (4 - per_layer)
            initial = [s[i] for s in states] + [None] * (2 - len(states))
            output, _, _, h, c = Layer.apply(x, *initial, *weights, lengths, mode, direction == 1)
            outputs.append(output)
            last.append([h, c][: len(states)])
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, [torch.stack(s) for s in zip(*last, strict=True)]


def _states(hx: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [hx] if isinstance(hx, Tensor) else list(hx)


def _takes_cells(states: Sequence[Tensor]) -> bool:
    """Whether PyTorch's composite of cells is needed: for an LSTM with projections, and under `torch.func`.

    There, at this key, an autograd.Function can't be called.
    """
    has_projection = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    return has_projection or torch._C._are_functorch_transforms_active()


def _kernel(mode: str) -> Callable[..., Any]:
    composite = getattr(torch.ops.aten, mode).input

    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        options = (has_biases, num_layers, dropout, train, bidirectional)
        states = _states(hx)
        if _takes_cells(states):
            return composite._op_dk(DispatchKey.CompositeImplicitAutograd, x, hx, params, *options, batch_first)
        if x.shape[1 if batch_first else 0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        output, last = _run(mode, x.transpose(0, 1) if batch_first else x, states, params, *options)
        return (output.transpose(0, 1) if batch_first else output, *last)

    return run


def _packed_kernel(mode: str) -> Callable[..., Any]:
    composite = getattr(torch.ops.aten, mode).data

    def run(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        """A packed sequence: its rows are spread to (steps, batch), and collected again afterwards."""
        options = (has_biases, num_layers, dropout, train, bidirectional)
        states = _states(hx)
        if _takes_cells(states):
            return composite._op_dk(DispatchKey.CompositeImplicitAutograd, data, batch_sizes, hx, params, *options)
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        active = torch.arange(batch) < batch_sizes.cpu()[:, None]
        places = active.flatten().nonzero().flatten().to(data.device)
        lengths = active.sum(0).to(data.device, torch.int32)
        spread = data.new_zeros((steps * batch, data.shape[1])).index_copy(0, places, data)
        output, last = _run(mode, spread.view(steps, batch, -1), states, params, *options, lengths)
        return (output.reshape(steps * batch, -1).index_select(0, places), *last)

    return run


for _mode in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    for _key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl(f"{_mode}.input", _kernel(_mode), _key)
        _library.impl(f"{_mode}.data", _packed_kernel(_mode), _key)
