"""Elementwise maths against the CPU: PyTorch's own samples, and integers, NaN, numbers, dtypes they miss."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import check, check_opinfo
from torch_tpu import metrics

NAN, INF = float("nan"), float("inf")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Without subnormal numbers: XLA runs with denormals-are-zero, so on the device they are zeros.
EDGES = torch.tensor([NAN, -INF, INF, -0.0, 0.0, -0.5, 0.5, 1.5, 2.5, -2.5, -7.25, 3.0, 1e-30, 3e38])

SAMPLED = """
    add sub rsub mul floor_divide remainder fmod pow float_power addcmul addcdiv lerp neg square reciprocal
    maximum minimum fmax fmin clamp clamp_min clamp_max abs copysign ldexp hypot
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not where
    isnan isinf isfinite isposinf isneginf signbit
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    sigmoid erf erfc sinc floor ceil trunc round frac sign sgn deg2rad rad2deg nan_to_num angle conj_physical
    atan2 logaddexp logaddexp2 heaviside nextafter frexp polar complex xlogy clone positive
"""
INTEGER_ONLY = "gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"

# Gradients that are sums over broadcast dimensions whose terms cancel.
LOOSE = {"pow": 2e-5, "float_power": 2e-5, "addcdiv": 2e-5}


@pytest.mark.parametrize("name", SAMPLED.split())
def test_samples_float32(name: str) -> None:
    check_opinfo(name, samples=3, rtol=LOOSE.get(name), atol=LOOSE.get(name))


@pytest.mark.parametrize("mode", ["no_rounding_mode", "trunc_rounding", "floor_rounding"])
def test_division_modes(mode: str) -> None:
    check_opinfo("div", (torch.float32, torch.bfloat16, torch.int64, torch.complex64), variant=mode, samples=2)


def test_round_to_decimals() -> None:
    for variant in ("decimals_0", "decimals_3", "decimals_neg_3"):
        check_opinfo("round", variant=variant, samples=2)


@pytest.mark.parametrize("name", ["add", "mul", "pow", "remainder", "lt", "maximum", "clamp", "abs", "where"])
def test_samples_int64(name: str) -> None:
    check_opinfo(name, (torch.int64,), samples=2)


@pytest.mark.parametrize("name", INTEGER_ONLY.split())
def test_samples_integers(name: str) -> None:
    check_opinfo(name, (torch.int64, torch.uint8, torch.bool), samples=2)


@pytest.mark.parametrize(
    "name", ["mul", "exp", "log", "sqrt", "tanh", "abs", "sgn", "angle", "reciprocal", "asin", "logaddexp"]
)
def test_samples_complex(name: str) -> None:
    check_opinfo(name, (torch.complex64,), samples=2)


# --- one call for many dtypes ------------------------------------------------------------------------------------


def _all_of(functions: list[Callable[..., Any]]) -> Callable[..., list[Any]]:
    return lambda *args: [f(*args) for f in functions]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_and_signs_of_edge_values(dtype: torch.dtype) -> None:
    functions = [torch.floor, torch.ceil, torch.trunc, torch.round, torch.frac, torch.sign, torch.signbit, torch.abs]
    functions += [torch.isnan, torch.isinf, torch.isfinite, torch.isposinf, torch.isneginf, torch.nan_to_num]
    functions += [torch.relu, torch.neg, torch.reciprocal, torch.square, torch.logical_not]
    check(_all_of(functions), EDGES.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_edge_values(dtype: torch.dtype) -> None:
    functions = [torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.remainder, torch.fmod, torch.floor_divide]
    functions += [torch.copysign, torch.heaviside, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]
    x = EDGES.to(dtype)
    check(_all_of(functions), x[:, None].contiguous(), x)


def test_hypot_and_logaddexp_of_infinities() -> None:
    check(_all_of([torch.hypot, torch.logaddexp, torch.logaddexp2, torch.atan2]), EDGES[:, None].contiguous(), EDGES)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_arithmetic_wraps(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.min + 1, 0, 1, 7, 87, limits.max - 1, limits.max], dtype=dtype)
    y = torch.tensor([3, 7, 100, 1, 2, 5, 11, 120], dtype=dtype)
    unary = [torch.neg, torch.abs, torch.square, torch.sign, torch.sgn, torch.bitwise_not, torch.signbit, torch.floor]
    check(_all_of(unary), x)
    binary = [
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        torch.maximum,
    ]
    binary += [torch.bitwise_and, torch.bitwise_xor, torch.bitwise_or, torch.gcd, torch.lcm, torch.lt, torch.pow]
    check(_all_of(binary), x, y)
    check(
        lambda a: [
            a + 100,
            a - 1,
            a * 2,
            5 - a,
            a / 2,
            a > 3,
            a & 15,
            a // 3,
            a % 7,
            -7 // (a | 1),
            a**3,
            2 ** (a % 5),
        ],
        x,
    )


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts_beyond_the_width(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 5, 100, torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)[:, None].contiguous()
    amounts = torch.tensor([0, 1, 7, 8, 15, 31, 32, 63, 64, 100] + ([-1, -9] if dtype.is_signed else []), dtype=dtype)
    check(_all_of([torch.bitwise_left_shift, torch.bitwise_right_shift, operator.lshift, operator.rshift]), x, amounts)
    check(lambda a: [a << 1, a >> 1, a << 70, a >> 70, torch.bitwise_left_shift(3, a % 9)], x)


def test_bool_arithmetic() -> None:
    x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(_all_of([torch.add, torch.mul, torch.maximum, torch.bitwise_xor, torch.lt, torch.div]), x, y)
    check(lambda a, b: [a + 2, a * 1.5, a & b, a | b, a ^ b, ~a, a == 1, a + b.to(torch.int8)], x, y)


def test_wide_integers() -> None:
    x = torch.tensor([2**33, -(2**33), 5, 2**33 + 1, -1, 2**62, 2**53 + 1])
    check(lambda a: [a + 1, a // 3, a % 1000003, a * 6364136223846793005 + 1442695040888963407, a >> 31], x)
    check(lambda a: [a & 0xFFFFFFFF, a == 2**33 + 1, a - 2**53, torch.gcd(a, a * 3)], x)


@pytest.mark.parametrize("divisor", [3, 7, 14, 16, 49, 1540])
def test_quotients_are_exact(divisor: int) -> None:
    n = torch.arange(1, 400)
    check(
        lambda n, d: [(n * divisor) // divisor, (n * divisor) // d, (n * divisor).float() / float(divisor)],
        n,
        torch.tensor(divisor),
    )


@pytest.mark.parametrize("function", [torch.floor_divide, torch.remainder, torch.fmod])
def test_integer_division_by_zero_raises(function: Callable[..., Any]) -> None:
    x = torch.tensor([3, 4], device="tpu")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(x, torch.tensor([1, 0], device="tpu"))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(x, 0)


# --- NaN and bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clamp_keeps_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, -2.0, 0.5, 9.0, INF, NAN], dtype=dtype)
    low, high = torch.zeros_like(x), torch.tensor([1.0, 1.0, NAN, 1.0, -1.0, 1.0], dtype=dtype)
    check(
        lambda x: [x.clamp(0, 1), x.clamp(min=0), x.clamp(max=1), x.clamp(2, 1), x.clamp_min(0.25), x.clamp_max(0.25)],
        x,
    )
    check(lambda x, a, b: [x.clamp(a, b), x.clamp(min=a), x.clamp(max=b), x.clamp_min(a), x.clamp_max(b)], x, low, high)


def test_clamp_promotes() -> None:
    x = torch.arange(-3, 4)
    check(lambda x: [x.clamp(-1, 1), x.clamp(-0.5, 1), x.clamp(min=torch.tensor(0.5)), x.clamp(max=torch.tensor(1))], x)


def test_nan_to_num_replacements() -> None:
    x = torch.tensor([NAN, INF, -INF, 1.0])
    check(lambda x: [x.nan_to_num(7.0), x.nan_to_num(1.0, 8.0), x.nan_to_num(neginf=-3.0), x.half().nan_to_num()], x)
    check(lambda z: z.nan_to_num(2.0, 3.0), torch.complex(x, x.flip(0)))


def test_where_overloads() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    check(lambda x: [torch.where(x > 0, x, x * x), torch.where(x > 0, x, 1), torch.where(x > 0, -1.5, x)], x)
    condition = torch.tensor([[True], [False]])
    check(
        lambda c, y: [
            torch.where(c, 1, 0),
            torch.where(c, 1.5, 0),
            torch.where(c, y, 2),
            torch.where(c, y, y.double()),
        ],
        condition,
        torch.arange(3),
    )


def test_subgradients_at_edges() -> None:
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0], requires_grad=True)
    functions = [torch.relu, torch.abs, torch.sign, torch.round, torch.sinc, lambda t: t.clamp(-1, 1)]
    functions += [
        lambda t: t.clamp_min(0),
        lambda t: torch.maximum(t, t.new_zeros(())),
        lambda t: torch.minimum(t, t.flip(0)),
    ]
    functions += [lambda t: torch.fmod(t, 2.0), lambda t: torch.atan2(t, t.flip(0)), lambda t: torch.hypot(t, t * 0)]
    check(_all_of(functions), x, rtol=1e-5, atol=1e-5)


# --- dtypes and numbers ------------------------------------------------------------------------------------------


def test_comparison_rounds_the_number_to_the_tensors_dtype() -> None:
    x = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    check(lambda x: [x == 0.1, x < 0.1, x >= 0.2, torch.tensor([1, 2], device=x.device) == 1.5], x)


def test_promotion_between_dtypes() -> None:
    f, h, i = torch.randn(4), torch.randn(4).half(), torch.arange(1, 5)
    check(
        lambda f, h, i: [f + h, f + i, h * i, i / i, h + 1.5, i + 1.5, f > i, i.to(torch.uint8) + i.to(torch.int8)],
        f,
        h,
        i,
    )
    check(lambda f, h: [f + torch.tensor(2.0, dtype=torch.float64, device=f.device), h + f[0], h.bfloat16() + h], f, h)


def test_float_into_integer_in_place_raises() -> None:
    x = torch.ones(2, dtype=torch.int64, device="tpu")
    with pytest.raises(RuntimeError, match=r"cast|not possible"):
        x += 0.5
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["fmod_", "remainder_", "floor_divide_", "pow_", "atan2_", "eq_", "mul_", "xlogy_", "ldexp_"]
)
@pytest.mark.parametrize("count", [0, 2])
def test_in_place_never_broadcasts_the_tensor(name: str, count: int) -> None:
    """Not even an empty one, which PyTorch's meta kernels resize."""
    for device in ("cpu", "tpu"):
        x, y = torch.ones(count, 1, 3, device=device), torch.ones(count, 10, 3, device=device)
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            getattr(x, name)(y)
        assert x.shape == (count, 1, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_place_with_numbers(dtype: torch.dtype) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y *= 0.5
        y += 1
        return y.div_(3).clamp_(min=0.1).sub_(1, alpha=0.25).pow_(2)

    check(run, torch.randn(8, 3).to(dtype).requires_grad_())


def test_empty_and_0d() -> None:
    check(_all_of([torch.add, torch.maximum, torch.remainder, torch.pow]), torch.ones(0, 3), torch.ones(3))
    check(_all_of([torch.add, torch.floor_divide, torch.gcd, torch.bitwise_and]), torch.tensor(7), torch.tensor([2, 3]))
    check(lambda x: x.gcd(x), torch.zeros(0, dtype=torch.int64))


def test_strides_of_results() -> None:
    x = torch.randn(2, 3, 4).permute(2, 0, 1)
    check(
        lambda x: [
            x + 1,
            x * x,
            x.exp(),
            x > 0,
            torch.where(x > 0, x, 0),
            x.clamp(0),
            x + torch.ones(3, device=x.device),
        ],
        x,
    )


def test_out_arguments() -> None:
    def run(a: torch.Tensor) -> list[torch.Tensor]:
        buffer = a.new_zeros(4, 3)
        torch.add(a, 1, out=buffer[1:3])
        transposed = a.new_empty(3, 2)
        torch.mul(a, 2, out=transposed.t())
        return [
            buffer,
            transposed,
            torch.exp(a, out=a.new_empty(0)),
            torch.lt(a, 2, out=a.new_empty(0, dtype=torch.bool)),
        ]

    check(run, torch.arange(6.0).reshape(2, 3))


def test_int8_comparison_then_reduction() -> None:
    d = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1]
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.bool, torch.float16):
        x, y = torch.tensor(d).to(dtype), torch.tensor([d, d, d[::-1]]).to(dtype)
        check(lambda x, y: [(x == y).all(dim=-1), (x != y).any(-1)], x, y)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_lerp_ends_are_exact(weight: float) -> None:
    check(
        lambda a, b: [torch.lerp(a, b, weight), torch.lerp(a, b, a.new_full((4,), weight))],
        torch.randn(4),
        torch.randn(4) * 1e6,
    )


def test_addcmul_and_addcdiv_with_value() -> None:
    x, a, b = torch.randn(3), torch.randn(2, 1), torch.rand(3) + 0.5
    check(
        lambda x, a, b: [torch.addcmul(x, a, b, value=0.3), torch.addcdiv(x, a, b, value=-2), x.addcmul(x, b)], x, a, b
    )
    i = torch.arange(1, 4)
    check(lambda i: torch.addcmul(i, i, i, value=3), i)


# --- powers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_powers_with_fixed_exponents(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 5.0]).to(dtype)
    exponents = [0, 1, 2, 3, 2.0, 0.5, 5, 2.5] + ([] if dtype is torch.int64 else [-0.5, -1, -2, -3])
    if dtype is torch.complex64:
        x = x[:2]  # what C++ gives for powers of complex 0 depends on the vector width
    check(
        lambda x: [x**e for e in exponents],
        x,
        rtol=2e-6 if dtype is torch.complex64 else None,
        atol=2e-6 if dtype is torch.complex64 else None,
    )


def test_power_of_number_and_negative_integers() -> None:
    check(lambda x: [2**x, 0.5**x, torch.pow(2.5, x.float())], torch.arange(5))
    check(torch.pow, torch.tensor([1, -1, 2, 0]), torch.tensor([-1, -3, -2, 0]))
    with pytest.raises(RuntimeError, match="negative integer powers"):
        torch.arange(3, device="tpu") ** -1


def test_exponents_compile_once_unless_cheap() -> None:
    x = torch.rand(3, device="tpu") + 1

    def compiled_by(exponent: float) -> int:
        before = metrics.counters().get("program", 0)
        x.pow(exponent)
        return metrics.counters().get("program", 0) - before

    compiled_by(1.7)
    assert [compiled_by(e) for e in (1.9, 2.1, -1.3)] == [0, 0, 0]
    assert compiled_by(3) == 1  # x·x·x
    assert compiled_by(3.0) <= 1
    assert x.pow(3).equal(x * x * x)


def test_static_numbers_of_equal_hash_are_different_programs() -> None:
    x = torch.arange(1, 4)
    check(lambda x: [x**2, x**2.0, x**1, x**True], x)


def test_changing_numbers_do_not_recompile() -> None:
    x, y = torch.rand(3, device="tpu"), torch.rand(3, device="tpu")

    def step(k: float) -> None:
        x.clamp(k, k + 1), x.lerp(y, k), torch.addcdiv(x, y, y, value=k), x > k, x.remainder(k), x.nan_to_num(k)
        torch.add(x, y, alpha=k), x.clamp_min(k), torch.where(x > 0, x, k), k**x

    step(0.25)
    before = metrics.counters().get("program", 0)
    for k in (0.5, 0.75, 1.5):
        step(k)
    assert metrics.counters().get("program", 0) == before


def test_number_as_operand_of_out() -> None:
    """Kernels get such a number as it is, also where the schema has a tensor; and errors are still the CPU's."""

    def run(x: torch.Tensor) -> Any:
        out = torch.zeros_like(x)
        functions = (torch.bitwise_and, torch.bitwise_xor, torch.bitwise_left_shift, torch.remainder, torch.fmod)
        results = [function(x, 3, out=out).clone() for function in functions]
        return results, torch.xlogy(x, 2, out=torch.zeros(6, device=x.device))

    check(run, torch.arange(1, 7, dtype=torch.int32))
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match=r"bitwise_and|not implemented for 'Float'"):
            torch.ones(2, device=device).bitwise_and_(1)


def test_bool_with_numbers_of_other_kinds() -> None:
    """A shift by a number makes an integer; a complex number in a bool says whether it is zero."""

    def run(x: torch.Tensor) -> Any:
        return x << 1, x >> 1, x.masked_fill(x, 1j), x.masked_fill(x, 0j), x.clone().masked_fill_(~x, 1 + 2j)

    check(run, torch.tensor([True, False]))
    for device in ("cpu", "tpu"):
        flags = torch.tensor([True, False], device=device)
        with pytest.raises(RuntimeError, match="Converting complex Scalar to non-complex type is not supported"):
            flags.index_fill(0, torch.tensor([0], device=device), 1j)


def test_number_to_the_power_of_a_permuted_tensor_is_contiguous() -> None:
    check(lambda x: (2**x, 1.5**x, x**2), torch.randn(2, 3, 4).permute(2, 0, 1))


def test_false_times_infinity_is_nan() -> None:
    """XLA makes a selection of a product with a converted bool, and a product of a division by a broadcast tensor."""

    def run(flags: torch.Tensor, x: torch.Tensor) -> Any:
        quotients = flags / flags, flags[:, None] / flags
        return flags * x, x * flags, quotients, flags * math.inf, flags * -torch.ones_like(x)

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        check(run, torch.tensor([False, True]), torch.tensor([math.inf, 2.0], dtype=dtype))


def test_integers_of_nothing_divided_by_zero() -> None:
    def run(x: torch.Tensor) -> Any:
        zero = torch.zeros((), dtype=torch.int32, device=x.device)
        return x // 0, x % 0, torch.fmod(x, zero), torch.div(x, zero, rounding_mode="trunc"), x.clone().floor_divide_(0)

    check(run, torch.zeros(0, 3, dtype=torch.int32))


@pytest.mark.parametrize("function", [torch.sin, torch.cos])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sine_of_many_numbers(function: Any, dtype: torch.dtype) -> None:
    # From 16,384 elements on it is computed without the C library, and with it where a number is large.
    x = torch.cat([torch.linspace(-30, 30, 9000), torch.randn(9000) * 1e5]).clamp(-1e6, 1e6).to(dtype)
    x[:8] = torch.tensor([0.0, -0.0, math.pi, -math.pi / 2, math.nan, 1e-30, 355.0, 710.0])
    check(function, x)
    check(function, torch.cat([x, torch.tensor([math.inf, -math.inf, 1.5e6, 3e38, -1e30], dtype=dtype)]))


def test_bfloat16_results_of_large_programs_are_rounded_to_nearest_even() -> None:
    """All bit patterns of bfloat16, each with another: ties, overflow, infinities, NaN, signed zeros."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    y = x[torch.randperm(x.numel())]
    got, want = (x.to("tpu") * y.to("tpu")).cpu(), x * y
    assert torch.equal(got.isnan(), want.isnan())
    # XLA:CPU flushes denormal numbers to zero, in operands too.
    least = torch.finfo(torch.bfloat16).tiny
    normal = ~want.isnan() & (want.abs() > least) & (x.abs() >= least) & (y.abs() >= least)
    assert normal.sum() > 30_000
    assert torch.equal(got[normal].view(torch.int16), want[normal].view(torch.int16))
    near = x[(x > 1) & (x < 2)].repeat(100)
    got, want = (near.to("tpu") + near.flip(0).to("tpu")).cpu(), near + near.flip(0)
    assert torch.equal(got, want)
