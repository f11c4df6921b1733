"""Integer and bool dtypes against the CPU: results, and the words in which they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import assert_same, no_fallback, to_device

Function = Callable[..., Any]


def outcome(function: Function, arguments: Any) -> Any:
    """The results and the arguments afterwards, or the exception's type and first line."""
    try:
        return function(*arguments), arguments
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


def same_outcome(function: Function, *arguments: Any) -> None:
    got = outcome(function, to_device(arguments))
    assert_same(got, outcome(function, to_device(arguments, "cpu")))


FLOATS = torch.tensor([1.0, 0.0, 3.0])
BOOLS = torch.tensor([True, False])
BATCH = torch.arange(6.0).reshape(1, 2, 3), torch.arange(12.0).reshape(1, 3, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float64])
@pytest.mark.parametrize("function", [torch.sum, torch.nansum, torch.nanmean, torch.mean, torch.prod])
def test_reductions_into_another_dtype(function: Function, dtype: torch.dtype) -> None:
    same_outcome(lambda x, out: function(x, dim=0, out=out), FLOATS, torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("function", [torch.sum, torch.prod, torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("x", [FLOATS, FLOATS.int(), BOOLS])
def test_reductions_in_bool(function: Function, x: torch.Tensor) -> None:
    same_outcome(lambda x: function(x, dim=0, dtype=torch.bool), x)


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod])
def test_division_into_another_dtype(divide: Function) -> None:
    x = torch.tensor([7, 9], dtype=torch.uint8)
    same_outcome(lambda a, b, out: divide(a, b, out=out), x, x - 5, torch.zeros(2, dtype=torch.int64))


def test_composite_out_checks_its_dtype() -> None:
    same_outcome(lambda x, out: torch.conj_physical(x, out=out), BOOLS, torch.zeros(2, dtype=torch.int64))


def test_empty_out_with_zero_strides() -> None:
    same_outcome(lambda x, out: torch.nonzero(x, out=out), torch.zeros(2, 3), torch.zeros(3, 0, dtype=torch.int64).t())


@pytest.mark.parametrize("exponent", [True, False, 0, 2, -1, 2.0])
def test_powers_of_bools(exponent: float) -> None:
    same_outcome(lambda x: torch.pow(x, exponent), BOOLS)
    same_outcome(lambda x: x.pow_(exponent), BOOLS)
    same_outcome(lambda x: list(torch._foreach_pow([x], exponent)), BOOLS)


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.tensor([1.0]), torch.ones(2, 4)])
def test_addbmm_in_place_takes_the_shape_of_the_result(x: torch.Tensor) -> None:
    same_outcome(lambda x, a, b: x.addbmm_(a, b, beta=2), x, *BATCH)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (256, torch.uint8),
        (257, torch.uint8),
        (129, torch.int8),
        (32769, torch.int16),
        (2050, torch.float16),
        (300, torch.bfloat16),
        (3, torch.bool),
        (3, torch.uint16),
        (3, torch.complex64),
        (0, torch.int64),
        (-1, torch.int64),
    ],
)
def test_randperm(n: int, dtype: torch.dtype) -> None:
    def function(like: torch.Tensor) -> torch.Tensor:
        return torch.randperm(n, dtype=dtype, device=like.device).sort()[0]

    same_outcome(function, BOOLS)


@pytest.mark.parametrize("target", [[0, 7, 9], [0, 1, -3], [-100, 4, 2]])
def test_class_out_of_bounds(target: list[int]) -> None:
    scores = torch.linspace(-2, 1, 15).reshape(3, 5)
    same_outcome(torch.nn.functional.cross_entropy, scores, torch.tensor(target))
    same_outcome(torch.nn.functional.multi_margin_loss, scores, torch.tensor(target))


UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned(dtype: torch.dtype) -> None:
    """What the CPU answers for: making, converting, comparing, copying, indexing, printing."""
    last = torch.iinfo(dtype).max
    x, other = torch.tensor([5, 0, last], dtype=dtype), torch.tensor([5, 9, last], dtype=dtype)
    for function in (
        lambda x, y: (x == y, x != y, torch.equal(x, y), x.eq(last)),
        lambda x, y: (x * y, x & y, x | y, x ^ y, x / y),
        lambda x, y: (x.sum(), x.any(), x.unique(), x.sort()),
        lambda x, y: (torch.cat([x, y]), torch.stack([x, y]), x.repeat(2), x.expand(2, 3).contiguous(), x.clone()),
        lambda x, y: (x[1:], x[::2], x[x == y], x[torch.tensor([2, 0], device=x.device)], torch.where(x == y, x, y)),
        lambda x, y: [x.to(d) for d in (torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)],
        lambda x, y: (x.view(torch.uint8), x.tolist(), x[2].item()),
        lambda x, y: (x.copy_(y), x.fill_(3), x[1:].zero_(), x.__setitem__(0, last)),
        lambda x, y: [torch.full((2,), v, dtype=dtype, device=x.device) for v in (last, 0, -1)],
        lambda x, y: torch.full((2,), last + 1, dtype=dtype, device=x.device),
        lambda x, y: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, last)),
        lambda x, y: x * y.to(torch.uint8),
    ):
        same_outcome(function, x, other)
    device = to_device(x)
    assert repr(device.cpu()) == repr(x)
    assert repr(device).replace(" ", "").replace("\n", "") == f"tensor([5,0,{last}],device='tpu:0',dtype={dtype})"


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.uint64])
def test_numbers_beyond_int64(dtype: torch.dtype, number: int) -> None:
    x = torch.tensor([1, 2], dtype=dtype)
    same_outcome(lambda x: x.eq(number), x)
    same_outcome(lambda x: x * number, x)
    same_outcome(lambda x: x.clone().fill_(number), x)
    same_outcome(lambda x: torch.full((2,), number, device=x.device), x)


@pytest.mark.parametrize("pad", ["reflect", "replicate"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 3)])
def test_padding_keeps_channels_last(pad: str, shape: tuple[int, ...]) -> None:
    channels_last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).contiguous(memory_format=channels_last)
    same_outcome(lambda x: torch.nn.functional.pad(x, (1, 1) * (len(shape) - 2), mode=pad), x)


@pytest.mark.parametrize("x", [BOOLS, BOOLS.to(torch.uint8)])
def test_refused_dtypes(x: torch.Tensor) -> None:
    for function in (torch.abs, torch.ceil, torch.argmax, torch.median, torch.relu, torch.nn.functional.hardswish):
        same_outcome(function, x)
    same_outcome(lambda x: x.abs_(), x)
    same_outcome(lambda x: torch.round(x, decimals=-1), x)
    same_outcome(lambda x: torch.logcumsumexp(x, 0), x)
    same_outcome(lambda x: torch.nn.functional.hardshrink(x), x)
    same_outcome(lambda x: torch.lerp(x, x, x), x)
    same_outcome(lambda x: torch.addcmul(x, x, x), x)
    same_outcome(lambda x: torch.pow(x, x), x)
    same_outcome(lambda x: torch._foreach_lerp([x], [x], 0.5), x)
    same_outcome(lambda x: torch._foreach_floor_([x]), x)
    same_outcome(lambda x: torch._foreach_frac([x]), x)
    same_outcome(lambda x: torch._foreach_addcdiv([x], [x], [x]), x)


@pytest.mark.parametrize("number", [True, 2, 1.5])
def test_bounds_of_bools(number: float) -> None:
    """Refused if they are bool themselves."""
    same_outcome(lambda x: x.clamp(number), BOOLS)
    same_outcome(lambda x: x.clamp(max=number), BOOLS)
    same_outcome(lambda x: x.clamp(number, number), BOOLS)
    same_outcome(lambda x: x.clamp_min_(number), BOOLS)
    same_outcome(lambda x: torch._foreach_maximum([x], number), BOOLS)
    same_outcome(lambda x: torch._foreach_clamp_max([x], [number]), BOOLS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "area"])
def test_resizing_integers(mode: str, dtype: torch.dtype) -> None:
    x = torch.arange(96, dtype=dtype).reshape(1, 2, 6, 8)
    same_outcome(lambda x: torch.nn.functional.interpolate(x, (3, 5), mode=mode), x)


def test_no_convolution_of_bools() -> None:
    x = torch.ones(1, 1, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.nn.functional.conv1d(x.to("tpu"), x.to("tpu"))


def test_what_the_cpu_refuses_too_is_no_fallback() -> None:
    with no_fallback():
        same_outcome(lambda x: torch._foreach_mm([x.reshape(1, 2)], [x.reshape(2, 1)]), BOOLS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32])
def test_bounds_that_do_not_fit(dtype: torch.dtype) -> None:
    x = torch.tensor([44, 2], dtype=dtype)
    for low, high in ((-5, 300), (None, 300), (-500, None), (0, 3), (1, 500.0)):
        same_outcome(lambda x: x.clamp(low, high), x)  # noqa: B023
        same_outcome(lambda x: x.clamp_(min=low, max=high), x)  # noqa: B023
    same_outcome(lambda x: torch.nn.functional.hardtanh(x, -300, 300), x)
    same_outcome(lambda x: torch.where(x > 3, 300, x), x)
    same_outcome(lambda x: torch.where(x > 3, x, -1), x)


def test_index_select_refuses() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    for dim, index in ((1, 3), (1, -1), (0, 2), (2, -1)):
        same_outcome(lambda x, i: x.index_select(dim, i), x, torch.tensor([index]))  # noqa: B023
    for dtype in (torch.int8, torch.bool, torch.float32):
        same_outcome(lambda x, i: x.index_select(1, i), x, torch.tensor([1, 0], dtype=dtype))
