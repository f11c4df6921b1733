"""`out=` forms: of operators that write more than their results or have other names, and what an empty `out` gets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.platform_marks import lapack
from tools.compare import check

aten = torch.ops.aten


def _empty() -> torch.Tensor:
    return torch.empty(0)


def test_batch_norm_writes_statistics_and_results() -> None:
    x, ones, zeros = torch.randn(4, 3, 5), torch.ones(3), torch.zeros(3)

    def legit(x, weight, bias, mean, var, *outs):
        names = dict(zip(("out", "save_mean", "save_invstd"), outs, strict=True))
        return aten._native_batch_norm_legit.out(x, weight, bias, mean, var, True, 0.1, 1e-5, **names)

    check(legit, x, ones, zeros, zeros, ones, _empty(), _empty(), _empty())

    def with_update(x, weight, bias, mean, var, *outs):
        names = dict(zip(("out", "save_mean", "save_invstd"), outs[:3], strict=True))
        aten._batch_norm_with_update.out(x, weight, bias, mean, var, 0.1, 1e-5, **names, reserve=outs[3])
        return outs[:3]

    reserve = torch.empty(0, dtype=torch.uint8)
    check(with_update, x, ones, zeros, zeros, ones, _empty(), _empty(), _empty(), reserve)


def test_every_gradient_of_a_convolution() -> None:
    x, w, grad = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 2, 2), torch.randn(1, 3, 3, 3)

    def run(grad, x, w, *outs):
        names = dict(zip(("grad_input", "grad_weight", "grad_bias"), outs, strict=True))
        return aten._slow_conv2d_backward.grad_input(grad, x, w, [2, 2], [1, 1], [0, 0], **names)

    # The CPU wants the weight's and the bias' gradients in their shapes.
    check(run, grad, x, w, _empty(), torch.zeros(3, 2, 2, 2), torch.zeros(3), rtol=1e-5, atol=1e-5)


def test_rrelu_with_noise() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    check(lambda x, noise, out: aten.rrelu_with_noise.out(x, noise, 0.1, 0.3, False, out=out), x, x, _empty())


def test_adaptive_average_pooling_gradient() -> None:
    x, grad = torch.randn(2, 4, 4, 4), torch.randn(2, 2, 2, 2)
    check(lambda g, x, out: aten.adaptive_avg_pool3d_backward.grad_input(g, x, grad_input=out), grad, x, _empty())


def test_normal_of_a_tensors_shape() -> None:
    out = torch.empty(0, device="tpu")
    aten.normal.out(torch.zeros(100, device="tpu"), 5.0, 0.1, out=out)
    assert out.shape == (100,)
    assert 4.5 < out.min().item() < out.max().item() < 5.5


@pytest.mark.parametrize(
    ("function", "args", "dtype"),
    [
        pytest.param(torch.linalg.inv, (torch.eye(3) + 0.25,), torch.float32, marks=lapack),
        pytest.param(torch.linalg.eigvals, (torch.diag(torch.tensor([1.0, 2.0])),), torch.complex64, marks=lapack),
        (torch.nonzero, (torch.tensor([[0, 1], [1, 1]]),), torch.int64),
        (torch.conj_physical, (torch.tensor([1 + 2j, 3j]),), torch.complex64),
        (torch.mvlgamma, (torch.tensor([3.0, 4.5]), 2), torch.float32),
        (torch.fft.ifft, (torch.arange(4) + 0j,), torch.complex64),
        (torch._C._nn.adaptive_avg_pool2d, (torch.arange(16.0).reshape(1, 4, 4), (2, 2)), torch.float32),
        (aten.range.out_, (1, 4), torch.float32),
        (aten._stack, ([torch.zeros(2), torch.ones(2)], 1), torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_empty_out_gets_shape_and_strides(function: Callable, args: tuple, dtype: torch.dtype) -> None:
    def run(out: torch.Tensor, *args: Any) -> torch.Tensor:
        assert function(*args, out=out) is out
        return out

    check(run, torch.empty(0, dtype=dtype), *args)


@pytest.mark.parametrize("name", ["all", "any"])
def test_truth_over_dimensions_is_a_bool(name: str) -> None:
    function = getattr(torch, name)
    x = torch.ones(2, 3, device="tpu")
    with pytest.raises(RuntimeError, match="only supports bool tensor for result, got: Long"):
        function(x, (0,), out=torch.zeros(3, dtype=torch.int64, device="tpu"))
    out = torch.zeros(0, dtype=torch.bool, device="tpu")
    assert function(x, (0,), out=out).tolist() == out.tolist() == [True] * 3


def test_one_warning_of_a_resized_out() -> None:
    """At the user's line, as on the CPU."""
    x = torch.ones(3, device="tpu")
    for function, out in (
        (lambda out: torch.add(x, x, out=out), torch.ones(2, device="tpu")),
        (lambda out: torch.nonzero(x, out=out), torch.ones(2, 1, dtype=torch.int64, device="tpu")),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(out)
        assert [(w.filename, w.lineno) for w in caught] == [(__file__, function.__code__.co_firstlineno)]
        assert out.shape[0] == 3
