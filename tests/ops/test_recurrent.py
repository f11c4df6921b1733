"""Recurrent layers and cells against the CPU: results and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tools.compare import check, no_fallback
from torch_tpu import metrics

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ROUNDED = {"rtol": 5e-2, "atol": 5e-2}
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def _module(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    if kind == "rnn_relu":
        options["nonlinearity"] = "relu"
    return KINDS[kind](5, 4, **options).to(dtype)


def _check(module: nn.Module, x: torch.Tensor, *states: Any, call: Any = None, **tolerance: Any) -> None:
    parameters = {k: v.detach().clone().requires_grad_() for k, v in module.named_parameters()}

    def run(parameters: dict[str, torch.Tensor], *inputs: Any) -> Any:
        # No functional_call: modules keep their weights in a list besides.
        copy = type(module).__new__(type(module))
        copy.__dict__.update(module.__dict__)
        copy._parameters = {**module._parameters, **parameters}
        copy._flat_weights = [parameters[name] for name in getattr(module, "_flat_weights_names", [])]
        return nn.Module.__call__(copy, *inputs) if call is None else call(copy, *inputs)

    check(run, parameters, x.requires_grad_(), *states, **(tolerance or CLOSE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False},
], ids=str)  # fmt: skip
def test_layers(kind: str, options: dict[str, Any]) -> None:
    _check(_module(kind, **options), torch.randn(7, 3, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_given_states(kind: str) -> None:
    module = _module(kind, num_layers=2)
    h, c = (torch.randn(2, 3, 4).requires_grad_() for _ in range(2))
    _check(module, torch.randn(6, 3, 5), (h, c) if kind == "lstm" else h)
    h, c = h.detach()[:, 0].clone().requires_grad_(), c.detach()[:, 0].clone().requires_grad_()
    _check(module, torch.randn(6, 5), (h, c) if kind == "lstm" else h)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if dtype is torch.float64 else ROUNDED
    _check(_module(kind, dtype, bidirectional=True), torch.randn(5, 3, 5, dtype=dtype), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(kind: str, bidirectional: bool) -> None:
    def call(module: nn.Module, x: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, [6, 4, 1], batch_first=False)
        output, last = module(packed)
        return pad_packed_sequence(output)[0], last

    _check(_module(kind, num_layers=2, bidirectional=bidirectional), torch.randn(6, 3, 5), call=call)


def test_unsorted_packed_sequences() -> None:
    def call(module: nn.Module, x: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, [2, 6, 4], batch_first=True, enforce_sorted=False)
        output, last = module(packed)
        return pad_packed_sequence(output, batch_first=True)[0], last

    _check(_module("lstm"), torch.randn(3, 6, 5), call=call)


def test_projection() -> None:
    _check(_module("lstm", proj_size=3, num_layers=2), torch.randn(4, 3, 5))


@pytest.mark.parametrize("cell", [nn.LSTMCell(5, 4), nn.GRUCell(5, 4), nn.RNNCell(5, 4), nn.LSTMCell(5, 4, bias=False),
                                  nn.GRUCell(5, 4, bias=False)], ids=str)  # fmt: skip
def test_cells(cell: nn.Module) -> None:
    def two_steps(module: nn.Module, x: torch.Tensor) -> Any:
        state = module(x)
        return module(x, state)

    _check(cell, torch.randn(3, 5), call=two_steps)


def test_dropout_between_layers() -> None:
    """Every element is 0 or scaled: with p=0.5 and one step, layer 2 of an identity-like network shows it."""
    module = nn.RNN(4, 4, num_layers=2, dropout=0.5, nonlinearity="relu", bias=False)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.eye(4) if "ih" in name else torch.zeros(4, 4))
    module = module.to("tpu")
    x = torch.ones(1, 64, 4, device="tpu", requires_grad=True)
    output, _ = module(x)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(grad.cpu(), output.detach().cpu())
    assert torch.equal(module.eval()(x)[0].cpu(), torch.ones(1, 64, 4))


def test_inference_mode_and_no_grad() -> None:
    module, x = _module("gru", bidirectional=True), torch.randn(5, 2, 5)
    want = module(x)[0].detach()
    module = module.to("tpu")
    with torch.inference_mode():
        torch.testing.assert_close(module(x.to("tpu"))[0].cpu(), want, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(module(x.to("tpu"))[0].cpu(), want, **CLOSE)


def test_func_transforms() -> None:
    module, x = _module("lstm"), torch.randn(5, 2, 5)
    want = torch.func.grad(lambda x: module(x)[0].sum())(x)
    module, y = module.to("tpu"), x.to("tpu")
    torch.testing.assert_close(torch.func.grad(lambda x: module(x)[0].sum())(y).cpu(), want, **CLOSE)


def test_compiled() -> None:
    module, x = _module("gru", bidirectional=True).to("tpu"), torch.randn(5, 2, 5).to("tpu").requires_grad_()
    compiled = torch.compile(lambda x: module(x)[0], backend="aot_eager")
    (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, lambda x: module(x)[0]))
    torch.testing.assert_close(got.cpu(), want.cpu())


def test_a_sequence_is_one_program() -> None:
    module, x = nn.LSTM(5, 4).to("tpu"), torch.randn(50, 2, 5, device="tpu")
    module(x)
    before = metrics.counters().get("execute", 0)
    module(x)
    # The loop, the initial states' zeros, and stacking the two last states.
    assert metrics.counters().get("execute", 0) - before <= 6


def test_no_steps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="sequence length"):
        nn.LSTM(5, 4).to("tpu")(torch.zeros(0, 2, 5, device="tpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [None, [4, 2, 1]])
def test_second_derivatives(kind: str, lengths: list[int] | None) -> None:
    """A gradient penalty: the gradient of the squared gradient of the inputs."""

    def penalty(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = x if lengths is None else pack_padded_sequence(x, torch.tensor(lengths))
        output, last = module(inputs)
        total = (output if lengths is None else output.data).square().sum()
        total = total + (last[1] if kind == "lstm" else last).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *module.parameters()])

    module = _module(kind, torch.float64, bidirectional=True)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    want = penalty(module, x.clone().requires_grad_())
    with no_fallback():
        got = penalty(copy.deepcopy(module).to("tpu"), x.to("tpu").requires_grad_())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu(), w)
