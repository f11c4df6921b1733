"""Tensors made from sizes and numbers against the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tools.compare import assert_same, check, no_fallback
from torch_tpu import metrics


def same(make: Callable[[str], object], **tolerance: float) -> None:
    """`make(device)` gives the same on both devices, without the CPU's help."""
    with no_fallback():
        got = make("tpu")
    assert_same(got, make("cpu"), **tolerance)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64, torch.complex128])
def test_filled(dtype: torch.dtype) -> None:
    def make(device: str) -> list[torch.Tensor]:
        like = torch.zeros(2, 3, device=device).t()
        return [
            torch.zeros(2, 0, 3, dtype=dtype, device=device),
            torch.ones(3, dtype=dtype, device=device),
            torch.full((2, 2), 3, dtype=dtype, device=device),
            torch.full((), 1, dtype=dtype, device=device),
            torch.full_like(like, 2, dtype=dtype),
            torch.ones_like(like, dtype=dtype),
            torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format),
            like.new_full((3,), 1, dtype=dtype),
            like.new_ones(2, dtype=dtype),
            like.new_zeros(2, dtype=dtype),
            torch.eye(3, dtype=dtype, device=device),
            torch.eye(2, 4, dtype=dtype, device=device),
            torch.scalar_tensor(1, dtype=dtype, device=device),
            torch.empty(3, dtype=dtype, device=device).fill_(1).zero_(),
        ]

    same(make)


def test_fill_takes_the_dtype_of_the_value() -> None:
    same(lambda d: [torch.full((2,), v, device=d) for v in (1, 1.5, True, 1 + 2j)])
    check(lambda x: x.fill_(torch.tensor(2.5, device=x.device)), torch.zeros(2, 3))
    check(lambda x: x.fill_(3 - 1j), torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_arange(dtype: torch.dtype | None) -> None:
    ranges: list[tuple[float, ...]] = [(5,), (0,), (2, 7), (1, 10, 3), (3, 3, 1)]
    if dtype is not torch.uint8:
        ranges += [(10, 0, -3), (0.5, 4)]
    if dtype is None or dtype.is_floating_point:
        ranges += [(0, 1, 0.1), (-2.5, 2, 0.75), (0, 1000, 0.3)]
    for numbers in ranges:
        same(lambda d, numbers=numbers: torch.arange(*numbers, dtype=dtype, device=d))


def test_arange_out_and_errors() -> None:
    same(lambda d: torch.arange(2, 6, out=torch.empty(0, dtype=torch.int32, device=d)))
    same(lambda d: torch.range(1, 4, 0.5, device=d))
    with pytest.raises(RuntimeError, match="inconsistent with step sign"):
        torch.arange(1, 0, device="tpu")
    with pytest.raises(RuntimeError, match="step must be nonzero"):
        torch.arange(0, 1, 0, device="tpu")


def test_moving_a_range_does_not_recompile() -> None:
    torch.arange(0, 5, device="tpu")
    before = metrics.counters().get("program", 0)
    assert [torch.arange(i, i + 5, device="tpu")[0].item() for i in range(4)] == [0, 1, 2, 3]
    assert [torch.arange(0, 5 * i, i, device="tpu")[4].item() for i in range(1, 4)] == [4, 8, 12]
    assert metrics.counters().get("program", 0) <= before + 2  # reading [0] and [4]


def test_length_of_a_range_is_its_own_program() -> None:
    assert [torch.arange(n, device="tpu").shape[0] for n in (3, 7, 3)] == [3, 7, 3]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
)
def test_linspace(dtype: torch.dtype) -> None:
    for numbers in ((0, 1, 5), (0, 10, 4), (3, 3, 3), (5, 1, 1), (0, 1, 0), (10, 0, 7)):
        same(lambda d, numbers=numbers: torch.linspace(*numbers, dtype=dtype, device=d))
    for numbers in ((0, 2, 3), (2, 0, 5), (0, 7, 8, 2.0)):
        # Powers are accurate to an ulp or two on either side; an integer result is truncated.
        same(
            lambda d, numbers=numbers: torch.logspace(*numbers, dtype=dtype, device=d).to(torch.complex64),
            rtol=1e-2 if dtype is torch.bfloat16 else 1e-6,
            atol=1 if not (dtype.is_floating_point or dtype.is_complex) else 1e-6,
        )


def test_linspace_between_tensors() -> None:
    def make(device: str) -> list[torch.Tensor]:
        low, high = torch.tensor(1.0, device=device), torch.tensor(3.0, device=device)
        return [
            torch.linspace(low, high, 5, device=device),
            torch.linspace(low, 2, 3, device=device),
            torch.linspace(0, high, 4, device=device),
            torch.logspace(low, high, 3, device=device),
        ]

    same(make)


@pytest.mark.parametrize("diagonal", [0, 1, -2, 10, -10])
def test_triangles(diagonal: int) -> None:
    check(lambda x: [x.tril(diagonal), x.triu(diagonal)], torch.randn(2, 4, 5, requires_grad=True))
    check(lambda x: [x.tril(diagonal), x.clone().triu_(diagonal)], torch.full((3, 3), float("nan")))
    check(lambda x: [x.tril(diagonal), x.triu(diagonal)], torch.ones(4, 3, dtype=torch.bool))
    same(lambda d: [f(4, 5, diagonal, device=d) for f in (torch.tril_indices, torch.triu_indices)])


def test_windows() -> None:
    names = ["hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"]
    same(
        lambda d: [
            getattr(torch, n)(k, periodic=p, device=d) for n in names for k in (0, 1, 2, 9) for p in (True, False)
        ]
    )


def test_vander_and_meshgrid() -> None:
    check(lambda x: torch.vander(x, 4), torch.randn(3))
    check(lambda x, y: list(torch.meshgrid(x, y, indexing="ij")), torch.arange(3), torch.arange(4))
    check(torch.complex, torch.randn(3), torch.randn(3))
    check(torch.polar, torch.rand(3), torch.randn(3))


def test_integers_lie_between_truncated_ends() -> None:
    for function, ends in ((torch.linspace, (4.3, -3)), (torch.linspace, (-2.7, 9.9)), (torch.logspace, (0, 1.2))):
        for dtype in (torch.int64, torch.int8):
            check(lambda device, f=function, e=ends, d=dtype: f(*e, 7, dtype=d, device=device.device), torch.ones(1))
    assert torch.linspace(50, 1, 50, dtype=torch.int64, device="tpu").tolist() == list(range(50, 0, -1))


ELSEWHERE = {
    "new_zeros": lambda x, **o: x.new_zeros(2, 3, **o),
    "new_ones": lambda x, **o: x.new_ones(2, 3, **o),
    "new_full": lambda x, **o: x.new_full((2, 3), 7, **o),
    "new_empty": lambda x, **o: x.new_empty(2, 3, **o).fill_(1),
    "new_empty_strided": lambda x, **o: x.new_empty_strided((2, 3), (1, 2), **o).fill_(1),
    "new_tensor": lambda x, **o: x.new_tensor([1, 2], **o),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **o: torch.full_like(x, 7, **o),
    "empty_like": lambda x, **o: torch.empty_like(x, **o).fill_(1),
    "rand_like": lambda x, **o: torch.rand_like(x, **o) * 0,
    "randn_like": lambda x, **o: torch.randn_like(x, **o) * 0,
    "randint_like": lambda x, **o: torch.randint_like(x, 1, **o),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_like_a_tensor_of_the_device_on_another(name: str) -> None:
    host = torch.ones(2, 3).t()
    x = host.to("tpu")
    for options in ({}, {"dtype": torch.float16}):
        want = ELSEWHERE[name](host, **options)
        for device in ("cpu", "meta", "tpu"):
            got = ELSEWHERE[name](x, device=device, **options)
            assert (got.device.type, got.dtype, got.shape) == (device, want.dtype, want.shape)
            assert got.stride() == want.stride()
            if device != "meta":
                assert torch.equal(got.cpu(), want)
            assert ELSEWHERE[name](host, device=device, **options).device.type == device


def test_memory_for_one_number() -> None:
    for made in (torch.empty_strided((), (), device="tpu"), torch.empty_strided((0,), (1,), device="tpu")):
        assert made.stride() == torch.empty(made.shape).stride()
    assert torch.empty_strided((), (), device="tpu").fill_(3).item() == 3
