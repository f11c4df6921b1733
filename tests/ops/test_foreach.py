"""Operators on lists of tensors: values of PyTorch's own samples, and how many programs a list is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import check
from torch_tpu import metrics
from torch_tpu.eager.dispatch.operator import _equal_groups


def _tensors(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 4), (), (5, 1)]
    return [(torch.rand(shape, generator=generator) + 0.5).to(dtype) for shape in shapes]


def _both_forms(name: str) -> list[Callable[..., Any]]:
    functional, in_place = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")

    def run_in_place(lists: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        own = [t.clone() for t in lists]
        in_place(own, *args, **kwargs)
        return own

    return [functional, run_in_place]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow"])
@pytest.mark.parametrize("second", ["list", "scalar", "scalars"])
def test_binary(name: str, second: str) -> None:
    other = {"list": _tensors(seed=1), "scalar": 1.5, "scalars": [0.5, 1, 2.0, 3]}[second]
    for function in _both_forms(name):
        check(function, _tensors(), other)


def test_add_with_alpha_and_tensor() -> None:
    for function in _both_forms("add"):
        check(function, _tensors(), _tensors(seed=1), alpha=0.3)
        check(function, _tensors(), torch.tensor(2.0), alpha=-1)
    for name in ("mul", "div"):
        for function in _both_forms(name):
            check(function, _tensors(), torch.tensor(3.0))


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
@pytest.mark.parametrize(
    "value", [0.25, [0.5, 1.0, -2.0, 3.0], torch.tensor([0.5, 1.0, -2.0, 3.0])], ids=["number", "list", "tensor"]
)
def test_pointwise(name: str, value: Any) -> None:
    for function in _both_forms(name):
        # A tensor of values is read on the host, one number per entry.
        check(lambda a, b, c, f=function: f(a, b, c, value), _tensors(), _tensors(seed=1), _tensors(seed=2))


def test_lerp() -> None:
    for function in _both_forms("lerp"):
        check(function, _tensors(), _tensors(seed=1), 0.75)
        check(function, _tensors(), _tensors(seed=1), _tensors(seed=2))


def test_power_of_number() -> None:
    check(lambda exponents: torch._foreach_pow(0.9, exponents), _tensors())


ROOTS = "exp sqrt rsqrt neg abs sign reciprocal"
ROUNDING = "floor ceil round trunc frac sigmoid"
LOGARITHMS = "tanh log log1p expm1 erf lgamma"


@pytest.mark.parametrize("names", [ROOTS, ROUNDING, LOGARITHMS])
def test_unary(names: str) -> None:
    for name in names.split():
        for function in _both_forms(name):
            check(function, _tensors())


def test_mixed_dtypes_in_one_list() -> None:
    lists = [torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.arange(4), torch.ones(2, dtype=torch.float64)]
    check(lambda x: torch._foreach_add(x, 1), lists)
    check(lambda x: torch._foreach_mul(x, 2.5), lists)


def test_empty_tensors_in_a_list() -> None:
    check(lambda x, y: torch._foreach_add(x, y), [torch.ones(0), torch.ones(2)], [torch.ones(0), torch.ones(2)])


def test_gradient() -> None:
    check(lambda x: torch._foreach_mul(torch._foreach_exp(x), 2.0), [t.requires_grad_() for t in _tensors()])


def test_a_list_is_one_program() -> None:
    x, y = ([t.to("tpu") for t in _tensors(seed=s)] for s in (0, 1))

    def run(k: float) -> None:
        torch._foreach_add_(x, y, alpha=k)
        torch._foreach_mul_(x, k)
        torch._foreach_addcdiv_(x, y, y, [k, k, k, k])
        torch._foreach_pow(x, k)
        torch._foreach_lerp_(x, y, k)

    run(0.3)
    before = metrics.counters()
    run(0.7)
    after = metrics.counters()
    assert after["execute"] - before["execute"] == 5
    assert after["program"] == before["program"]


def test_a_long_list_is_run_in_equal_groups() -> None:
    """200 tensors of which every fifth has another shape, and 5 of a third: two programs, whatever the length."""
    shapes = [(2, 3) if i % 5 == 0 else (4,) for i in range(200)] + [(7,)] * 5
    host = [torch.rand(shape) for shape in shapes]
    device, factors = [t.to("tpu") for t in host], [1 + i / 100 for i in range(len(host))]
    before = metrics.counters().get("program", 0)
    got = torch._foreach_mul(device, factors)
    assert metrics.counters()["program"] == before + 2
    torch.testing.assert_close([t.cpu() for t in got], torch._foreach_mul(host, factors))
    for tensors in (host, device):
        torch._foreach_addcmul_(tensors, tensors, [t + 1 for t in tensors], value=0.5)
        torch._foreach_sub_(tensors[:150], 0.25)
    torch.testing.assert_close([t.cpu() for t in device], host)


def test_groups_have_as_many_of_each_shape() -> None:
    shapes = [(2,), (3,), (2,), (2,), (3,), (2,), (4,)]
    assert _equal_groups([torch.empty(s) for s in shapes]) == [[0, 2, 1], [3, 5, 4], [6]]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_writes_are_known_to_autograd(device: str) -> None:
    """A value that the backward pass needs, changed through a list (as optimizers do) in between."""
    x = torch.randn(3, device=device, requires_grad=True)
    y, other = x * 2, torch.randn(3, device=device)
    loss = (y * y).sum()
    before = y._version
    with torch.no_grad():
        torch._foreach_mul_([y, other], 3.0)
        torch._foreach_zero_([other])
    assert (y._version - before, other._version) == (1, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, foreach=True).step()
    assert parameter._version == 1
