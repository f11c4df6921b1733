"""Views, writes through views and numbers as data: what every lowering relies on."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from tools.compare import check, no_fallback
from torch_tpu import metrics
from torch_tpu.eager import kernel_table
from torch_tpu.ops.core import derived, families, registry


def test_write_through_strided_view() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:3, ::2].mul_(10)
        x.t()[0].fill_(0.5)
        x[3].add_(y)
        return x * 1

    check(run, torch.randn(4, 6), torch.randn(6))


def test_gradient_through_views_and_in_place() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[1:3, ::2].mul_(10)
        y.t()[0].fill_(0.5)
        return y * y

    check(run, torch.randn(4, 4, requires_grad=True))


def test_changing_number_does_not_recompile() -> None:
    x = torch.ones(3, device="tpu")
    x * 1.5
    before = metrics.counters().get("program", 0)
    results = [(x * k).sum().item() for k in (0.5, 2.5, -0.0, float("inf"))]
    x.sum().item()
    assert results == [1.5, 7.5, 0.0, float("inf")]
    assert metrics.counters().get("program", 0) <= before + 1  # sum


def test_changing_view_offset_does_not_recompile() -> None:
    x = torch.arange(12.0).reshape(6, 2).to("tpu")
    with no_fallback():
        (x[1] + 1).cpu()
        before = metrics.counters().get("program", 0)
        rows = [(x[i] + 1).tolist() for i in range(1, 6)]
    assert rows == [[2.0 * i + 1, 2.0 * i + 2] for i in range(1, 6)]
    assert metrics.counters().get("program", 0) == before


def test_default_dtype_may_change() -> None:
    def made() -> list[torch.Tensor]:
        x = torch.arange(1, 4, device="tpu")
        return [torch.full((2,), 0.1, device="tpu"), x / 2, x.float() * 0.1, torch.ones(2, device="tpu")]

    assert [t.dtype for t in made()] == [torch.float32] * 4
    torch.set_default_dtype(torch.float64)
    try:
        wide = made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in wide] == [torch.float64, torch.float64, torch.float32, torch.float64]
    assert wide[0].tolist() == [0.1, 0.1]
    assert [t.dtype for t in made()] == [torch.float32] * 4


def test_a_lowering_gives_a_result_for_each_place_of_the_schema() -> None:
    """One too few is an error, and nobody else's result takes its place."""
    families.load()
    func = torch.ops.aten.native_layer_norm_backward.default
    rule = registry.find(func)
    short = dataclasses.replace(rule, function=lambda *args, **kwargs: rule.function(*args, **kwargs)[1:])
    x, of_rows, weight = torch.ones(2, 3), torch.ones(2, 1), torch.ones(3)
    on_device = [t.to("tpu") for t in (x, x, of_rows, of_rows, weight, weight)]
    x, grad, mean, rstd, weight, bias = on_device
    with (
        mock.patch.object(derived, "lowering", lambda f: short if f is func else registry.find(f)),
        pytest.raises(AssertionError, match="2 results for 3 returned"),
    ):
        func(grad, x, [3], mean, rstd, weight, bias, [False, True, True])


@pytest.mark.parametrize("register", [registry.lower, registry.decompose])
def test_an_operator_that_pytorch_lacks_is_named(register: Any) -> None:
    with pytest.raises(ValueError, match=r"has no operator aten::add\.NoSuch, which .*<lambda> lowers"):
        register("add.NoSuch")(lambda x: x)
    with pytest.raises(ValueError, match=r"has no operator prims::no_such, which"):
        register("prims::no_such")(lambda x: x)


@pytest.mark.parametrize("register", [registry.lower, registry.decompose])
@pytest.mark.parametrize("name", ["add.Tensor", "_aminmax"])  # one has a lowering, one a decomposition
def test_an_operator_lowered_twice_is_named(register: Any, name: str) -> None:
    families.load()
    with pytest.raises(ValueError, match=rf"{name} has two lowerings: torch_tpu\.ops\..* and .*<lambda>"):
        register(name)(lambda x: x)


def test_a_higher_order_operator_that_pytorch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="has no higher-order operator no_such, which"):
        registry.lower_higher_order("no_such")(lambda tracer: None)
    families.load()
    with pytest.raises(ValueError, match="cond is lowered twice: torch_tpu"):
        registry.lower_higher_order("cond")(lambda tracer: None)


def test_a_kernel_that_pytorch_has_no_operator_for_is_named() -> None:
    with pytest.raises(ValueError, match=r"has no operator aten::copy_\.NoSuch"):
        kernel_table.kernel("copy_.NoSuch")(lambda x: x)
    torch.ones(1, device="tpu")
    with pytest.raises(ValueError, match="copy_ has two kernels"):
        kernel_table.kernel("copy_")(lambda x: x)
