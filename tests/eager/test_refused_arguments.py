"""What the CPU refuses is refused in every call, also where a program for the same shapes is known already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

aten = torch.ops.aten
X = torch.linspace(0.1, 0.9, 10)

Case = tuple[Callable[[torch.Tensor, Any], Any], Any, Any]
# A function of a tensor and an argument; an argument that is taken, and one that is refused.
CASES: dict[str, Case] = {
    "softshrink": (functional.softshrink, 0.25, -0.25),
    "huber_loss": (lambda x, v: functional.huber_loss(x, x + 1, delta=v), 0.5, -0.5),
    "smooth_l1_loss": (lambda x, v: functional.smooth_l1_loss(x, x + 1, beta=v), 0.5, -0.5),
    "normal": (torch.normal, 0.5, -0.5),
    "leaky_relu_": (
        lambda x, v: functional.leaky_relu_(x.clone().requires_grad_() * 1, v).sum().backward(),
        0.5,
        -0.5,
    ),
    "elu_": (lambda x, v: functional.elu_(x.clone().requires_grad_() * 1, v).sum().backward(), 0.5, -0.5),
    "softmax": (lambda x, v: x.softmax(v), 0, 1),
    "softmax from the end": (lambda x, v: x.softmax(v), -1, -2),
    "sort": (torch.sort, 0, 1),
    "sort in order": (lambda x, v: torch.sort(x, dim=v, stable=True), -1, -2),
    "cummax": (lambda x, v: torch.cummax(x[0], v), 0, 1),
    "select_scatter": (lambda x, v: torch.select_scatter(x, x[0], v, 3), 0, 1),
    "select_scatter index": (lambda x, v: torch.select_scatter(x, x[0], 0, v), 3, 10),
    "select_scatter index from the end": (lambda x, v: torch.select_scatter(x, x[0], 0, v), -10, -11),
    "index_reduce": (
        lambda x, v: x.view(2, 5).index_reduce(0, torch.tensor([0, 1], device=x.device), x.view(v), "amax"),
        (2, 5),
        (5, 2),
    ),
    "addmm": (lambda x, v: torch.addmm(x[:2].view(v), x.view(2, 5), x.view(5, 2)), (1, 2), (1, 1, 2)),
    "addmv": (lambda x, v: torch.addmv(x[:2].view(v), x.view(2, 5), x[:5]), (2,), (1, 2)),
    "baddbmm": (lambda x, v: torch.baddbmm(x[:2].view(v), x.view(1, 2, 5), x.view(1, 5, 2)), (1, 2), (1, 1, 1, 2)),
    "empty_strided sizes": (lambda x, v: torch.empty_strided((v,), (1,), device=x.device), 1, -1),
    "empty_strided strides": (lambda x, v: torch.empty_strided((2,), (v,), device=x.device), 1, -1),
    "slice_scatter": (lambda x, v: torch.slice_scatter(x, x, v), 0, -2),
    "as_strided_copy": (lambda x, v: torch.as_strided_copy(x[:1].clone(), (1,), (1,), v), 0, 1),
    "as_strided_scatter": (lambda x, v: torch.as_strided_scatter(x[:1].clone(), x[3], (), (), v), 0, 1),
    "as_strided_": (lambda x, v: x.as_strided_((1,), (v,)), 1, -1),
    "interpolate": (
        lambda x, v: functional.interpolate(x.view(1, 2, 5), v, mode="linear", align_corners=True),
        3,
        0,
    ),
    "unfold": (lambda x, v: functional.unfold(x.view(1, 1, 2, 5), 1, padding=v), 1, -1),
    "native_group_norm": (lambda x, v: torch.native_group_norm(x.view(1, 2, 5), None, None, v, 2, 5, 1, 1e-5), 1, -1),
    "conv_transpose": (
        lambda x, v: functional.conv_transpose1d(x.view(1, 2, 5), x.view(2, 1, 5), stride=2, output_padding=v),
        1,
        2,
    ),
    "conv dilation": (
        lambda x, v: functional.conv1d(x.view(1, 2, 5), x.view(2, 1, 5)[..., :1], dilation=v, groups=2),
        1,
        0,
    ),
    "conv_transpose dilation": (
        lambda x, v: functional.conv_transpose1d(x.view(1, 2, 5), x.view(2, 1, 5), dilation=v),
        1,
        0,
    ),
    "ldexp": (lambda x, v: torch.ldexp(x, torch.ones(10, device=x.device).to(v)), torch.int32, torch.bool),
    "segment_reduce": (
        lambda x, v: torch.segment_reduce(x.to(v), "sum", lengths=torch.tensor([10], device=x.device)),
        torch.float32,
        torch.int64,
    ),
    "segment_reduce of complex": (
        lambda x, v: torch.segment_reduce(x.to(v), "sum", lengths=torch.tensor([10], device=x.device)),
        torch.float64,
        torch.complex64,
    ),
    "segment_reduce lengths": (
        lambda x, v: torch.segment_reduce(x, "sum", lengths=torch.tensor([10], device=x.device).to(v)),
        torch.int32,
        torch.uint8,
    ),
    "native_dropout": (lambda x, v: torch.native_dropout(x, v, True), 0.5, 1.5),
    "rrelu_with_noise": (lambda x, v: aten.rrelu_with_noise(-x, x, 0.25, v, True), 0.5, 0.125),
    "rrelu_with_noise_": (lambda x, v: aten.rrelu_with_noise_(-x, x, v, 0.5, True), 0.25, 0.75),
    "renorm_": (lambda x, v: x[None].renorm_(2, 0, v), 0.5, -0.5),
    "conv_transpose to nothing": (
        lambda x, v: functional.conv_transpose1d(x.view(1, 2, 5), x.view(2, 1, 5), padding=v),
        1,
        5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_whatever_was_called_before(name: str) -> None:
    function, taken, refused = CASES[name]
    function(X.clone(), taken)
    with pytest.raises((RuntimeError, IndexError)) as on_cpu:
        function(X.clone(), refused)
    for argument in (refused, taken, refused, taken):
        if argument is taken:
            function(X.to("tpu"), argument)
        else:
            with pytest.raises(on_cpu.type):
                function(X.to("tpu"), argument)


def test_what_only_meta_kernels_refuse_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(0, 5)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.roll(x.to("tpu"), 1, 7)
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "warn")
    for _ in range(2):
        with pytest.warns(UserWarning, match="roll runs on the CPU: IndexError: Dimension out of range"):
            found = torch.roll(x.to("tpu"), 1, 7)
        assert found.shape == torch.roll(x, 1, 7).shape
