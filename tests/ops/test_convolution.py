"""Convolutions, plain and transposed, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, check_opinfo, forms_for_tpus, no_fallback
from torch_tpu.ops import convolution

# A weight's gradient sums over batch and space, in another order than the CPU does.
SUM = {"rtol": 1e-4, "atol": 1e-4}
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64)
FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_database(name: str) -> None:
    check_opinfo(
        f"nn.functional.{name}", (torch.float32, torch.float64, torch.complex64, torch.int64), samples=8, **SUM
    )


@pytest.mark.parametrize("name", ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"])
def test_database_transposed(name: str) -> None:
    check_opinfo(
        f"nn.functional.{name}", (torch.float32, torch.float64, torch.complex64, torch.int64), samples=5, **SUM
    )


def test_a_kernel_of_one_element_as_tpus_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution, where XLA:CPU gets a matrix product."""
    monkeypatch.setattr(convolution, "_is_matrix_product", lambda *_: False)
    check(F.conv2d, leaf(2, 3, 5, 7), leaf(4, 3, 1, 1), leaf(4), **SUM)
    check(F.conv_transpose1d, leaf(2, 3, 11), leaf(3, 5, 1), **SUM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [1, 3])
def test_low_precision_accumulates_in_float32(dtype: torch.dtype, kernel: int) -> None:
    x, w, b = (torch.randn(*s).to(dtype) for s in ((2, 64, 6, 6), (8, 64, kernel, kernel), (8,)))
    want = F.conv2d(x.double(), w.double(), b.double())
    got = F.conv2d(x.to("tpu"), w.to("tpu"), b.to("tpu"))
    assert got.dtype is dtype
    # One rounding to `dtype` of a sum that is exact to float32.
    torch.testing.assert_close(got.cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-4)
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    check(F.conv2d, x, w, b, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "groups", "dilation"),
    [
        (2, 1, 1, 1, 1),
        (3, 0, 2, 2, 1),
        ((3, 2), (1, 2), (2, 1), 2, (4, 3)),
        (1, 0, 0, 4, 2),
        (2, 0, 1, 1, 2),
        (1, 2, 0, 2, 1),
    ],
)
def test_transposed_options(stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any) -> None:
    # Case 45 (pytorch/xla#2351, pytorch/pytorch#63314): sizes and gradients with everything combined.
    x, w, b = leaf(2, 4, 4, 5), leaf(4, 3, 3, 2), leaf(3 * groups)
    check(F.conv_transpose2d, x, w, b, stride, padding, output_padding, groups, dilation, **SUM)


def test_transposed_stride_without_overlap() -> None:
    x = torch.ones(1, 1, 2, requires_grad=True)
    check(lambda x, w: F.conv_transpose1d(x, w, stride=2), x, leaf(1, 1, 1))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [(1, 0, 1, 1), (2, 1, 1, 1), (3, 2, 2, 1), (1, 1, 1, 2), (2, 1, 2, 4), (1, 3, 1, 1)],
)
def test_gradients(ndim: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    x, w, b = leaf(2, 4, *(7, 6, 5)[:ndim]), leaf(8, 4 // groups, *(3, 2, 1)[:ndim]), leaf(8)
    check(FORWARD[ndim], x, w, b, stride, padding, dilation, groups, **SUM)


@pytest.mark.parametrize("transposed", [False, True])
def test_unit_kernel_is_a_matrix_product(transposed: bool) -> None:
    x, b = leaf(3, 4, 5, 2), leaf(6)
    w = leaf(4, 6, 1, 1) if transposed else leaf(6, 4, 1, 1)
    check(TRANSPOSED[2] if transposed else F.conv2d, x, w, b, **SUM)
    check(TRANSPOSED[2] if transposed else F.conv2d, x, w, b, stride=2, **SUM)
    check(TRANSPOSED[2] if transposed else F.conv2d, x, w, b, padding=1, **SUM)


@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 6), (4, 5, 6, 7)])
def test_without_batch(shape: tuple[int, ...]) -> None:
    ndim = len(shape) - 1
    check(FORWARD[ndim], leaf(*shape), leaf(3, 4, *[2] * ndim), leaf(3), **SUM)
    check(TRANSPOSED[ndim], leaf(*shape), leaf(4, 3, *[2] * ndim), leaf(3), **SUM)


def test_empty_batch() -> None:
    check(F.conv2d, leaf(0, 4, 6, 6), leaf(3, 4, 3, 3), leaf(3))
    check(F.conv_transpose2d, leaf(0, 4, 6, 6), leaf(4, 3, 3, 3), leaf(3))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding: str) -> None:
    check(lambda x, w: F.conv2d(x, w, padding=padding, dilation=2), leaf(1, 2, 7, 7), leaf(3, 2, 2, 3), **SUM)


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_channels_last_strides(ndim: int, which: str) -> None:
    format = torch.channels_last if ndim == 2 else torch.channels_last_3d
    x, w = torch.randn(2, 4, *[6] * ndim), torch.randn(5, 4, *[3] * ndim)
    if which == "input":
        x = x.to(memory_format=format)
    else:
        w = w.to(memory_format=format)
    check(FORWARD[ndim], x, w, **SUM)
    check(TRANSPOSED[ndim], x, w.transpose(0, 1)[:4].expand(4, 5, *[3] * ndim), **SUM)


def test_nan_and_infinity_spread_over_their_windows_only() -> None:
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 1, 1], x[0, 0, 4, 4] = float("nan"), float("inf")
    check(F.conv2d, x, torch.ones(1, 1, 2, 2))


def test_module_trains_under_every_option() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect"),
            torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            torch.nn.ConvTranspose2d(8, 2, 4, stride=2, padding=1),
        ).to(x.device)
        net(x).square().mean().backward()
        return [p.grad for p in net.parameters()]

    check(run, torch.randn(2, 3, 9, 9), strides=False, **SUM)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((1, 3, 8, 8), (4, 2, 3, 3), {}),
        ((1, 2, 2, 2), (4, 2, 3, 3), {}),
        ((1, 2, 8, 8), (4, 2, 3, 3), {"stride": 0}),
        ((1, 2, 8, 8), (4, 2, 3, 3), {"padding": -1}),
        ((1, 2, 8, 8), (4, 2, 3, 3), {"bias": torch.zeros(3)}),
    ],
)
def test_errors_are_pytorchs(x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as want:
        F.conv2d(torch.zeros(x), torch.zeros(w), **options)
    options = {k: v.to("tpu") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with pytest.raises(RuntimeError) as got:
        F.conv2d(torch.zeros(x, device="tpu"), torch.zeros(w, device="tpu"), **options)
    assert str(got.value).split("\n")[0] == str(want.value).split("\n")[0]


def test_slow_variants() -> None:
    x, w, b = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 2, 2), torch.randn(3)
    aten = torch.ops.aten
    check(lambda x, w, b: aten.thnn_conv2d(x, w, [2, 2], b, [2, 2], [1, 1]), x, w, b, **SUM)
    check(lambda x, w, b: aten.slow_conv_dilated2d(x, w, [2, 2], b, [1, 1], [0, 0], [2, 2]), x, w, b, **SUM)
    check(
        lambda x, w, b: aten.slow_conv_transpose2d(x, w, [2, 2], b, [2, 2], [0, 0], [1, 1]),
        x,
        w.transpose(0, 1),
        b,
        **SUM,
    )
    x, w = torch.randn(2, 4, 5, 6, 6), torch.randn(3, 4, 2, 2, 2)
    check(lambda x, w, b: aten.slow_conv3d(x, w, [2, 2, 2], b), x, w, b, **SUM)
    check(lambda x, w, b: aten.slow_conv_dilated3d(x, w, [2, 2, 2], b, [1] * 3, [0] * 3, [2] * 3), x, w, b, **SUM)
    check(lambda x, w, b: aten.slow_conv_transpose3d(x, w, [2, 2, 2], b, [2] * 3), x, w.transpose(0, 1), b, **SUM)


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False]])
def test_slow_backward(wanted: list[bool]) -> None:
    x, w, grad = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 2, 2), torch.randn(2, 3, 4, 4)
    backward = torch.ops.aten._slow_conv2d_backward.output_mask
    check(lambda *args: backward(*args, [2, 2], [2, 2], [1, 1], wanted), grad, x, w, **SUM)


def test_double_backward() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(F.conv2d(x, w, stride=2, padding=1).tanh().sum(), x, create_graph=True)
        return g.square().sum()

    with no_fallback():
        check(run, leaf(2, 3, 7, 7), leaf(4, 3, 3, 3), **SUM)


@pytest.mark.parametrize(
    ("function", "x", "weight", "options"),
    [
        (F.conv2d, (2, 6, 9, 8), (6, 1, 3, 3), {"padding": 1, "stride": 2, "groups": 6}),  # depthwise
        (F.conv2d, (2, 3, 9, 8), (6, 1, 3, 2), {"dilation": 2, "groups": 3}),  # two results for each channel
        (F.conv1d, (2, 4, 30), (4, 1, 7), {"padding": 3, "groups": 4}),
        (F.conv3d, (1, 3, 5, 4, 6), (3, 1, 2, 3, 3), {"padding": 1, "groups": 3}),
        (F.conv_transpose2d, (2, 4, 5, 6), (4, 1, 3, 3), {"stride": 2, "padding": 1, "groups": 4}),
        (F.conv2d, (2, 8, 6, 7), (12, 2, 3, 3), {"padding": 1, "groups": 4}),  # one by one
        (F.conv2d, (2, 32, 5, 6), (32, 2, 3, 3), {"stride": 2, "groups": 16}),  # two groups in each
        (F.conv2d, (1, 22, 5, 6), (22, 2, 1, 1), {"groups": 11}),  # left to XLA
        (F.conv_transpose2d, (2, 6, 5, 6), (6, 2, 3, 3), {"stride": 2, "groups": 3, "output_padding": 1}),
        (
            F.conv3d,
            (2, 3, 5, 6, 7),
            (4, 3, 3, 2, 3),
            {"padding": (1, 0, 1), "stride": (2, 1, 2), "dilation": (1, 2, 1)},
        ),
        (F.conv3d, (2, 4, 5, 6, 7), (4, 2, 2, 3, 3), {"groups": 2}),
        (F.conv_transpose3d, (2, 3, 3, 4, 4), (3, 4, 3, 3, 2), {"stride": (2, 1, 2), "output_padding": (1, 0, 1)}),
    ],
)
def test_grouped_and_3d(function: Any, x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]) -> None:
    check(lambda x, w: function(x, w, **options), leaf(*x), leaf(*weight), rtol=1e-4, atol=1e-5)


def test_a_depthwise_convolution_keeps_infinities_apart() -> None:
    x = torch.ones(1, 4, 4, 4)
    x[0, 1] = torch.inf
    check(lambda x, w: F.conv2d(x, w, groups=4), x, torch.ones(4, 1, 2, 2))
    check(lambda x, w: F.conv2d(x, w, groups=2), x, torch.ones(4, 2, 2, 2))


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 1), (4, 4), (16, 2)])
def test_the_weight_gradient_for_tpus_has_eight_channels(channels: int, groups: int) -> None:
    x, weight = leaf(2, channels, 6, 5), leaf(4, channels // groups, 3, 3)
    with forms_for_tpus() as programs:
        check(lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=groups), x, weight, **SUM)
    (text,) = {text for name, text in programs if name == "convolution_backward_overrideable"}
    assert text.count("stablehlo.optimization_barrier") == (0 if channels // groups >= 8 else 2)
    assert "-> tensor<8x4x3x3xf32>" in text
