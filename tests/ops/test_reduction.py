"""Reductions and norms against the CPU: special values, empty input, dtypes, run-time corrections."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tools.compare import check, check_opinfo, to_device
from torch_tpu import metrics

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor([[1.0, NAN, 3.0, NAN], [2.0, 5.0, 4.0, 5.0], [NAN] * 4, [-0.0, 0.0, -0.0, INF]])

F32, BF16, F64, I64, BOOL, C64 = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("sum", (F32, BF16, I64, BOOL, C64)),
        ("nansum", (F32, I64)),
        ("mean", (F32, BF16)),
        ("prod", (F32, I64, BOOL)),
        ("amax", (F32, BF16, I64, BOOL)),
        ("amin", (F32,)),
        ("aminmax", (F32, I64)),
        ("argmax", (F32, I64)),
        ("argmin", (F32, BF16)),
        ("any", (F32, BOOL, C64)),
        ("all", (F32, I64)),
        ("var", (F32, C64)),
        ("std", (F32, BF16)),
        ("var_mean", (F32,)),
        ("std_mean", (F64,)),
        ("logsumexp", (F32, I64, C64)),
        ("count_nonzero", (F32, BOOL, C64)),
        ("linalg.vector_norm", (F32, BF16, C64)),
        ("dist", (F32,)),
        ("cdist", (F32,)),
        ("nn.functional.pdist", (F32,)),
        ("trace", (F32,)),
    ],
)
def test_database(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_opinfo(name, dtypes, samples=4)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("variant", ["reduction_no_dim", "reduction_with_dim"])
def test_extreme_database(name: str, variant: str) -> None:
    check_opinfo(name, (F32, I64), variant=variant, samples=4)


@pytest.mark.parametrize("variant", ["", "fro", "inf"])
def test_norm_database(variant: str) -> None:
    check_opinfo("norm", variant=variant, samples=4)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "name", ["max", "min", "argmax", "argmin", "amax", "amin", "sum", "nansum", "mean", "any", "all"]
)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    """NaN wins and its first position counts; of equal elements the first one."""
    function = getattr(torch, name)
    check(lambda x: (function(x, 1), function(x, 0), function(x)), SPECIAL.to(dtype))


@pytest.mark.parametrize(
    "function", [torch.logsumexp, torch.var, torch.std, torch.prod, torch.count_nonzero], ids=lambda f: f.__name__
)
def test_special_values_along_a_dimension(function: Callable[..., torch.Tensor]) -> None:
    check(lambda x: function(x, 1), SPECIAL)


def test_logsumexp_of_infinities() -> None:
    check(lambda x: torch.logsumexp(x, 1), torch.tensor([[INF, 1.0], [-INF, -INF], [INF, -INF], [1000.0, 1000.0]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, F64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, -1, 0], [100, 100, 100]]).to(dtype)
    check(lambda x: [x.sum(), x.sum(0), x.prod(1), x.max(0), x.min(1), x.amax(), x.argmin(1), x.any(1), x.all()], x)
    check(lambda x: [x.sum(1, dtype=torch.int8), x.mean(1, dtype=torch.float64), x.count_nonzero(0)], x)


def test_0d_and_empty_dimension_lists() -> None:
    scalar = torch.tensor(2.5)
    check(lambda x: [x.sum(0), x.mean(-1), x.max(0), x.argmax(0), x.amin(), x.prod(0), x.logsumexp(0), x.any()], scalar)
    check(lambda x: [x.sum([]), x.mean([]), x.amax(()), torch.var(x, dim=[])], torch.randn(3, 2))
    check(lambda x: [x.any(()), x.all(())], torch.eye(2) > 0)


def test_empty() -> None:
    check(lambda x: [x.sum(1), x.prod(1), x.any(1), x.all(1), x.mean(1), x.logsumexp(1), x.sum()], torch.zeros(3, 0))
    check(lambda x: [x.max(0), x.argmax(0), x.amin(0), x.median(0)], torch.zeros(3, 0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.max(),
        lambda x: x.max(1),
        lambda x: x.min(1),
        lambda x: x.argmin(1),
        lambda x: x.median(1),
        lambda x: torch.linalg.vector_norm(x, INF, 1),
    ],
)
def test_empty_without_identity_raises(function: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(3, 0)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        function(x)
    with pytest.raises(expected.type, match=r"(?i)non-zero size|reduction dim|norm on the dimension"):
        function(x.to("tpu"))


def test_amax_of_nothing_raises() -> None:
    with pytest.raises(IndexError, match="Expected reduction dim 1 to have non-zero size"):
        torch.zeros(3, 0, device="tpu").amax(1)


def test_var_of_integers_raises() -> None:
    with pytest.raises(RuntimeError, match="only support floating point and complex"):
        torch.arange(3, device="tpu").var()


@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, INF, -INF])
def test_norms(p: float) -> None:
    check(lambda x: torch.linalg.vector_norm(x, p, 1), SPECIAL)
    check(lambda x: [torch.linalg.vector_norm(x, p, dtype=F64), x.norm(p)], torch.randn(3, 4))
    check(lambda x: x.norm(p, 0, keepdim=True), torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("correction", [0, 1, 3, 5, 0.5])
def test_correction(correction: float) -> None:
    check(lambda x: torch.var_mean(x, 0, correction=correction), torch.randn(3, 4, requires_grad=True))


def test_changing_correction_does_not_recompile() -> None:
    x = torch.randn(7, device="tpu")
    x.var(correction=0)
    before = metrics.counters().get("program", 0)
    x.var(correction=2)
    assert metrics.counters().get("program", 0) == before


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF])
def test_distances(p: float) -> None:
    """Also between equal rows, where the gradient is a matter of choice."""
    x = torch.randn(2, 5, 3)
    x[:, 1] = x[:, 0]
    check(lambda a, b: torch.cdist(a, b, p=p), x.clone().requires_grad_(), x[:1, :4].clone().requires_grad_())
    check(lambda a: torch.pdist(a, p=p), x[0].clone().requires_grad_())


def test_distances_through_a_product() -> None:
    # √ of a rounded difference of squares: PyTorch's own method for more than 25 rows.
    check(lambda a, b: torch.cdist(a, b), torch.randn(2, 30, 3), torch.randn(30, 3) + 3, rtol=1e-4, atol=1e-4)


def test_distances_of_nothing() -> None:
    check(lambda a: [torch.cdist(a, a), torch.pdist(a)], torch.zeros(0, 3))
    check(lambda a: [torch.cdist(a, a), torch.pdist(a)], torch.zeros(3, 0))
    check(torch.pdist, torch.zeros(1, 3))


def test_out_and_strides() -> None:
    check(lambda x, o: torch.sum(x, 0, out=o), torch.randn(3, 4), torch.zeros(4))
    check(lambda x, v, i: torch.max(x, 0, out=(v, i)), torch.randn(3, 4), torch.zeros(4), torch.zeros(4, dtype=I64))
    check(lambda x: [x.permute(2, 0, 1).sum(0), x.permute(2, 0, 1).amax(1, keepdim=True)], torch.randn(3, 4, 5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, I64, BOOL, torch.float16, F32])
def test_all_of_equal_rows(dtype: torch.dtype) -> None:
    """openxla/xla#9431: comparing int8 rows and reducing with `all` gave False under compilation."""
    row = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1])
    x, y = to_device((row.to(dtype), torch.stack([row, row, row.flip(0)]).to(dtype)))
    assert (x == y).all(-1).tolist() == [True, True, False]
    assert (x != y).any(-1).tolist() == [False, False, True]
    assert (x == y).sum(1).tolist()[:2] == [13, 13]


def test_int64_beyond_32_bits() -> None:
    x = torch.full((1000,), 2**40)
    x[3] = -(2**62)
    check(lambda x: [x.sum(), x.max(), x.argmin(), x.amin(), x.aminmax()], x)


def test_sums_of_wide_columns() -> None:
    x = torch.randn(3, 5, 4096)
    x[0, 1, 7], x[1, 2, 8], x[2, 3, 9] = float("inf"), float("nan"), -float("inf")
    check(lambda x: [x.sum(0), x.sum((0, 1)), x.sum(0, keepdim=True), x.mean(0)], x)
    check(lambda x: x.sum(0), x.bfloat16())
    check(lambda x: x.sum(0), torch.randn(2, 4096, dtype=torch.float64, requires_grad=True))
