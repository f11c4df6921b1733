"""Results whose size depends on data, against the CPU; one wait for each."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tools.compare import check, check_opinfo
from torch_tpu.eager.kernels import dynamic_size

NAN = math.nan
F32, BF16, I64, BOOL, C64 = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
TENSORS = [
    torch.tensor([[1.0, NAN, 3.0], [0.0, -0.0, NAN]]),
    torch.zeros(0, 3),
    torch.tensor(0.0),
    torch.tensor(3.0),
    torch.zeros(2, 3),
    torch.randint(0, 3, (4, 5, 2)),
    torch.tensor([NAN, 1.0, NAN, 2.0, -0.0, 0.0]),
    torch.tensor([True, False, True]),
]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("nonzero", (F32, BF16, I64, BOOL, C64)),
        ("argwhere", (F32,)),
        ("masked_select", (F32, I64, C64)),
        ("unique", (F32, I64)),
        ("unique_consecutive", (F32, BOOL)),
        ("bincount", (I64,)),
        ("repeat_interleave", (F32, I64)),
    ],
)
def test_database(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_opinfo(name, dtypes, samples=5)


@pytest.mark.parametrize("x", TENSORS, ids=lambda t: f"{t.dtype}{tuple(t.shape)}")
def test_elements(x: torch.Tensor) -> None:
    check(lambda x: x.nonzero(), x)
    check(lambda x: torch.nonzero(x, as_tuple=True), x)
    check(lambda x: x.unique(return_inverse=True, return_counts=True), x)
    check(lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), x)


@pytest.mark.parametrize(
    "x",
    [
        torch.randint(0, 2, (20, 3)),
        torch.randint(0, 2, (2, 9, 2)).float(),
        torch.randint(-3, 3, (30, 2)),
        torch.rand(3, 4) > 0.5,
        torch.zeros(0, 3),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)
def test_slices(x: torch.Tensor) -> None:
    check(lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True), x)
    check(lambda x: torch.unique_consecutive(x, dim=0, return_inverse=True, return_counts=True), x)
    if x.numel():
        check(lambda x: torch.unique(x, dim=-1, return_inverse=True, return_counts=True), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, I64, torch.float16, torch.float64, BOOL])
def test_unique_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([3, 1, 0, 3, 2, 2]).to(dtype)
    check(lambda x: x.unique(return_inverse=True, return_counts=True), x)
    check(lambda x: x.unique(), torch.tensor([2**33, 5, -(2**33), 5, 2**62]))


def test_masks() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    check(lambda x, m: [x.masked_select(m), x[m.expand(4, 5)], x[:, m]], x, torch.rand(5) > 0.5)
    check(lambda x, m: x[m].exp().sum(), x, torch.rand(4) > 0.5)
    check(lambda x, m: [x.masked_select(m), x[m]], torch.tensor(2.0), torch.tensor(True))
    check(lambda x, m: x.masked_select(m), torch.randn(3), torch.zeros(2, 1, dtype=BOOL))


def test_results_are_ordinary_tensors() -> None:
    """They lie in larger memory, which nobody should notice."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        positive = x[x > 0]
        doubled = positive * 2
        positive.add_(1)
        rows = (x > 0).nonzero()
        rows[:, 0].mul_(10)
        return [positive, doubled, rows, rows.t().contiguous(), positive.clone()]

    check(run, torch.randn(6, 7))


def test_sizes_that_are_values() -> None:
    counts = torch.tensor([1, 2, 0, 3])
    check(torch.repeat_interleave, counts)
    check(torch.repeat_interleave, torch.zeros(3, dtype=I64))
    check(torch.repeat_interleave, torch.zeros(0, dtype=I64))
    check(lambda r: torch.repeat_interleave(r, output_size=6), counts.int())
    check(lambda x, r: x.repeat_interleave(r, 1), torch.randn(2, 4, requires_grad=True), counts)
    check(lambda x: [x.bincount(), x.bincount(minlength=9)], torch.randint(0, 7, (50,)))
    check(lambda x: x[:, 0].bincount(), torch.ones(32, 2, dtype=I64))
    check(lambda x: [x.bincount(), x.bincount(minlength=3)], torch.zeros(0, dtype=I64))
    for weights in (torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0]).double()):
        check(lambda x, w: x.bincount(w), torch.tensor([1, 1, 4], dtype=torch.uint8), weights)


@pytest.mark.parametrize("size", [0, 1, 3, 9])
def test_nonzero_static(size: int) -> None:
    for x in (torch.tensor([[0, 1, 2], [0, 0, 3]]), torch.tensor(1.0), torch.zeros(0, 3)):
        # Strides are those of PyTorch's meta kernel (as on CUDA), which the CPU kernel doesn't follow.
        check(lambda x: torch.nonzero_static(x, size=size, fill_value=7), x, strides=False)


def test_out() -> None:
    # Not `check`: an `out=` tensor grown from nothing is contiguous here, of transposed layout on the CPU.
    positions = torch.zeros(0, dtype=I64, device="tpu")
    assert torch.nonzero(torch.eye(3, device="tpu"), out=positions) is positions
    assert positions.tolist() == [[0, 0], [1, 1], [2, 2]]
    check(lambda x, o: torch.masked_select(x, x > 0, out=o), torch.randn(9), torch.zeros(0))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (torch.repeat_interleave, torch.tensor([1, -2])),
        (torch.repeat_interleave, torch.tensor([1.0, 2.0])),
        (torch.repeat_interleave, torch.tensor([[1, 2]])),
        (lambda x: torch.repeat_interleave(x, output_size=4), torch.tensor([1, 2])),
        (torch.bincount, torch.tensor([1, -2])),
        (torch.bincount, torch.tensor([[1, 2]])),
        (torch.bincount, torch.tensor([1.0, 2.0])),
        (torch.bincount, torch.tensor([True])),
        (lambda x: torch.bincount(x, x[:1]), torch.tensor([1, 2])),
        (lambda x: torch.bincount(x, minlength=-1), torch.tensor([1])),
        (lambda x: x.masked_select(x), torch.ones(3)),
        (lambda x: torch.unique(x, dim=5), torch.ones(2)),
        (lambda x: torch.unique(x, dim=0), torch.tensor(1.0)),
        (lambda x: torch.unique(x, dim=0), torch.zeros(3, 0)),
    ],
)
def test_errors(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as expected:
        function(x)
    with pytest.raises(expected.type) as got:
        function(x.to("tpu"))
    assert str(got.value)[:40] == str(expected.value)[:40]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each read on the host brought."""
    seen: list[int] = []
    read = dynamic_size._read
    monkeypatch.setattr(dynamic_size, "_read", lambda numbers: seen.append(numbers.numel()) or read(numbers))
    return seen


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(return_inverse=True, return_counts=True),
        lambda x: torch.unique_consecutive(x.reshape(2, -1), dim=1),
        lambda x: x.bincount(),
        lambda x: torch.repeat_interleave(x),
    ],
)
def test_waits_once(function: Callable[[torch.Tensor], object], waits: list[int]) -> None:
    function(torch.tensor([3, 0, 1, 1], device="tpu"))
    assert len(waits) == 1


def test_positions_of_nothing_have_the_strides_of_the_cpu() -> None:
    check(lambda x: [x.nonzero(), torch.where(x > 0)[0].view(torch.uint8)], torch.zeros(0, 3))
    check(lambda x: [x.nonzero(), torch.where(x > 0)[0].view(torch.uint8)], torch.zeros(2, 3))
    check(lambda x: x.nonzero(), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("low", "high"),
    [(-700, 900), (0, 4096), (0, 4097), (5, 6), (-(2**31), 2**31 - 1)],
    ids=["narrow", "as wide as long", "one wider", "all equal", "all that int32 has"],
)
def test_unique_counts_integers_that_span_few_values(dtype: torch.dtype, low: int, high: int) -> None:
    x = torch.randint(low, high, (64, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[0, 1] = low, high - 1
    check(torch.unique, x)
    check(lambda x: torch.unique(x, return_counts=True), x)
    check(lambda x: torch.unique(x, return_inverse=True, return_counts=True), x)
