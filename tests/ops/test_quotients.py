"""Quotients and square roots of real numbers are rounded correctly on XLA:CPU, in every mode and size of program.

The reference is exact arithmetic or numpy, which divides and takes roots with the processor's instructions. PyTorch's
own square root is none: on some processors MKL's is off by one unit in the last place for a seventh of all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module

Values = npt.NDArray[Any]
MODES = ("strict", "fused", "compiled")
FLOATS = (torch.float32, torch.float64)
# Programs of these sizes are compiled with different options.
SHAPES = ((8, 16), (40, 50), (80, 64), (16, 600))


def run(mode: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of tensors, or of lists of them, gives on the device in a mode, as arrays of numpy."""
    on_device = [torch.from_numpy(a).tpu() if isinstance(a, np.ndarray) else a for a in arguments]
    if mode == "compiled":
        torch.compiler.reset()
        function = torch.compile(function, backend="tpu", fullgraph=True)
    modes = torch.tpu.EagerMode
    with torch.tpu.set_eager_mode(modes.DEFER_AND_FUSE if mode == "fused" else modes.DEFER_NEVER):
        results = function(*on_device)
        return [r.cpu().numpy() for r in (results if isinstance(results, (tuple, list)) else [results])]


def numbers(dtype: torch.dtype, shape: Sequence[int], seed: int, *, width: float = 0.9) -> Values:
    """Numbers of both signs whose exponents take this share of the dtype's range."""
    rng = np.random.default_rng(seed)
    kind = torch.finfo(dtype)
    lowest, highest = np.log2(kind.tiny) * width, np.log2(kind.max) * width
    values = np.exp2(rng.uniform(lowest, highest, shape)) * rng.choice([-1, 1], shape)
    return np.asarray(values, str(dtype).removeprefix("torch."))


def assert_same(actual: Sequence[Values], expected: Sequence[Values]) -> None:
    """Bit for bit, also the sign of zero, but for results near denormal numbers, which XLA:CPU takes for zero."""
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        counted = ~((e != 0) & (np.abs(e) < 4 * np.finfo(e.dtype).tiny))
        a, e = a[counted], e[counted]
        same = ((a == e) & (np.signbit(a) == np.signbit(e))) | (np.isnan(a) & np.isnan(e))
        assert same.all(), f"result {i}: {np.mean(~same):.3f} differ, such as {a[~same][:3]} for {e[~same][:3]}"


def forms(x: Any, y: Any, row: Any, column: Any, positive: Any, root: Callable[[Any], Any]) -> list[Any]:
    """Quotients and roots, each of which XLA's simplifier or one of its libraries would replace."""
    quotient, by_row, scaled, rooted = x / y, y / row, x / 3, root(positive)
    return [
        *(quotient, by_row, scaled, rooted),
        *(x / 127.5, x / 0.7, x / 1024, 1 / x, x / column, x / row, row / x),
        *(quotient / row, x / by_row, quotient / by_row, scaled / 7, scaled * 7, (x * 7) / 3),
        *(x / rooted, x / root(positive * 2), 1 / rooted, rooted * rooted, root(positive / 3), rooted / column),
    ]


def torch_forms(*arguments: Any) -> list[Any]:
    return forms(*arguments, torch.sqrt)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_and_roots_are_rounded_correctly(dtype: torch.dtype, shape: tuple[int, int], mode: str) -> None:
    # So that no intermediate result is denormal or infinite.
    arguments = [
        numbers(dtype, s, seed, width=0.2) for seed, s in enumerate((shape, shape, shape[1:], (shape[0], 1), shape))
    ]
    arguments[4] = np.abs(arguments[4])
    assert_same(run(mode, torch_forms, *arguments), forms(*arguments, np.sqrt))


@pytest.mark.parametrize("size", [60, 1500, 6000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_over_the_whole_range(dtype: torch.dtype, size: int) -> None:
    """Divisors above 2^126 among them, whose reciprocal is denormal."""
    x, y = (numbers(dtype, size, seed, width=0.999) for seed in (1, 2))
    with np.errstate(over="ignore", under="ignore"):
        assert_same(
            run("strict", lambda x, y: (x / y, x / y[:1], x.abs().sqrt()), x, y), [x / y, x / y[:1], np.sqrt(np.abs(x))]
        )
    large = float(np.finfo(x.dtype).max)
    assert_same(run("strict", lambda x: x / large, x), [x / x.dtype.type(large)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype: torch.dtype, mode: str) -> None:
    kind = torch.finfo(dtype)
    special = [0.0, np.inf, np.nan, kind.max, kind.tiny, 1.0, 3.0, 1 + kind.eps]
    name = str(dtype).removeprefix("torch.")
    x = np.array([s * v for v in special for s in (1, -1)], name)

    def parts(x: Any, y: Any) -> list[Any]:
        return [x / y, x / 3, x / 1, -2 / x, x / -0.0, (x / y) / 3]

    with np.errstate(all="ignore"):
        expected = [*parts(x, x[:, None]), np.sqrt(x), 1 / np.sqrt(x)]
    actual = run(mode, lambda x: [*parts(x, x[:, None]), x.sqrt(), x.rsqrt()], x)
    assert_same(actual, expected)


def test_against_exact_arithmetic() -> None:
    """float64, for which numpy has no wider type to be checked by."""
    x, y = (numbers(torch.float64, 400, seed, width=0.3) for seed in (1, 2))
    quotients = [float(Fraction(a) / Fraction(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    with localcontext() as context:
        context.prec = 60
        roots = [float(Decimal(abs(a)).sqrt()) for a in x.tolist()]
    by_three = [float(Fraction(a) / 3) for a in x.tolist()]
    results = run("strict", lambda x, y: (x / y, x.abs().sqrt(), x / 3), x, y)
    assert_same(results, [np.array(e) for e in (quotients, roots, by_three)])


@pytest.mark.parametrize("mode", MODES)
def test_other_operators(mode: str) -> None:
    """Those made of a quotient or a root, in the order in which PyTorch's kernels compute."""
    x, y = (numbers(torch.float32, (70, 64), seed, width=0.1) for seed in (1, 2))
    p, one = np.abs(y), np.float32(1)

    def operators(x: torch.Tensor, y: torch.Tensor, p: torch.Tensor, host: torch.Tensor) -> list[torch.Tensor]:
        return [
            *(x.reciprocal(), p.rsqrt(), p**-0.5, p**0.5, x**-1, x / host, torch.true_divide(x, 49)),
            *(torch.div(x, 0.7, rounding_mode="trunc"), torch.div(x, y[:1], rounding_mode="floor")),
            *(torch.addcdiv(x, x, y), F.softsign(x), F.hardsigmoid(x), F.hardswish(x)),
            *(*torch._foreach_div([x, y], 3), *torch._foreach_div([x, y], [y, x])),
            *(*torch._foreach_div([x, y], [3.0, 0.7]), *torch._foreach_reciprocal([x])),
            *(*torch._foreach_sqrt([p]), *torch._foreach_rsqrt([p])),
        ]

    seven = np.float32(0.7)
    gate = np.clip(x + 3, 0, 6)
    expected = [
        *(one / x, one / np.sqrt(p), one / np.sqrt(p), np.sqrt(p), one / x, x / seven, x / np.float32(49)),
        *(np.trunc(x / seven), torch.div(torch.from_numpy(x), torch.from_numpy(y[:1]), rounding_mode="floor").numpy()),
        *(x + x / y, x / (one + np.abs(x)), gate / np.float32(6), x * gate / np.float32(6)),
        *(x / np.float32(3), y / np.float32(3), x / y, y / x, x / np.float32(3), y / seven),
        *(one / x, np.sqrt(p), one / np.sqrt(p)),
    ]
    assert_same(run(mode, operators, x, y, p, torch.tensor(0.7)), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_multiples_stay_integers(dtype: torch.dtype, mode: str) -> None:
    """49·k / 49 is k: alone, after a sum, and in a sum, which is left to another library than other operations."""
    k = torch.arange(1, 2001).numpy()
    many = np.random.default_rng(0).integers(-99, 99, (64, 512)).astype(str(dtype).removeprefix("torch."))
    roots = np.abs(many) + 1

    def quotients(k: torch.Tensor, many: torch.Tensor, roots: torch.Tensor) -> list[torch.Tensor]:
        return [
            ((k * 49).to(dtype) / 49).long(),
            (many * 49).mean(1) * 512,
            (many * 49 / 49).sum(1),
            (many * roots / (roots * roots).sqrt()).sum(1),
        ]

    whole = [k, many.sum(1) * 49, many.sum(1), many.sum(1)]
    for actual, expected in zip(run(mode, quotients, k, many, roots), whole, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", MODES)
def test_int8_quantisation_picks_the_same_integers(mode: str) -> None:
    x = np.random.default_rng(0).normal(size=(100, 256)).astype(np.float32)
    # Values in the middle between two steps, which the last bit decides.
    x[:, ::2] = ((np.arange(128) - 64 + 0.5) * np.abs(x).max(1, keepdims=True) / 127).astype(np.float32)

    def quantised(x: torch.Tensor) -> list[torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 127
        steps = [x / scale, x / 0.037, x / scale[:1]]
        return [s.round().clamp(-128, 127).to(torch.int8) for s in steps]

    for actual, expected in zip(run(mode, quantised, x), quantised(torch.from_numpy(x)), strict=True):
        np.testing.assert_array_equal(actual, expected.numpy())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype: torch.dtype, mode: str) -> None:
    x, y = (torch.from_numpy(numbers(torch.float32, (70, 64), seed, width=0.05)).to(dtype) for seed in (1, 2))
    wide, other = x.double(), y.double()
    row = other[:1]
    expected = [wide / other, wide / 3, wide / row, (wide / row).floor(), wide.abs().sqrt(), 1 / wide.abs().sqrt()]

    def parts(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        results = [x / y, x / 3, x / y[:1], x // y[:1], x.abs().sqrt(), x.abs().rsqrt()]
        return [r.float() for r in results]

    actual = run(mode, lambda x, y: parts(x.to(dtype), y.to(dtype)), x.float().numpy(), y.float().numpy())
    assert_same(actual, [e.to(dtype).float().numpy() for e in expected])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_remainders_by_a_number(dtype: torch.dtype) -> None:
    """PyTorch rounds the number to the dtype of the tensor first."""
    x = torch.linspace(-9, 9, 257).to(dtype)
    for number in (0.7, 0.1, -0.3):
        for function in (torch.remainder, torch.fmod):
            assert function(x.tpu(), number).cpu().equal(function(x, number))


def test_the_divisor_is_data() -> None:
    """The second call runs the program of the first."""
    x = numbers(torch.float32, 5000, 0, width=0.1)
    for number in (3, 7, 0.7, 1024):
        assert_same(run("strict", lambda x, number=number: x / number, x), [x / np.float32(number)])


def test_only_xla_cpu_gets_barriers() -> None:
    def program(platform: str) -> str:
        spec = ((64,), torch.float32)

        def body(x: hlo.Array, y: hlo.Array) -> list[hlo.Array]:
            return [x / y, x / 1024, hlo.sqrt(x), hlo.rsqrt(x)]

        return str(module.build("quotients", module.Target(platform, lapack=False), [spec, spec], body)[0])

    names = ("optimization_barrier", "stablehlo.rsqrt", "stablehlo.sqrt", "stablehlo.multiply", "stablehlo.add")
    assert [name in program("tpu") for name in names] == [False, True, True, False, False]
    assert [name in program("cpu") for name in names] == [True, False, True, True, True]
