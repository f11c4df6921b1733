"""Random operators: distributions, reproducibility, argument checks. Every test has a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tools.compare import check, no_fallback
from torch_tpu import metrics

stats = pytest.importorskip("scipy.stats")

COUNT = 20_000
# The seed is fixed: a test that passes once passes always. The level says how unlikely a right sampler is to fail.
LEVEL = 1e-4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


def drawn(
    fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32, count: int = COUNT
) -> np.ndarray:
    with no_fallback():
        result = fill(torch.empty(count, dtype=dtype, device="tpu"))
    assert result.dtype is dtype
    return result.cpu().double().numpy()


CONTINUOUS = {
    "uniform": (lambda t: t.uniform_(-2, 5), stats.uniform(-2, 7)),
    "normal": (lambda t: t.normal_(3, 2), stats.norm(3, 2)),
    "log_normal": (lambda t: t.log_normal_(0.5, 0.7), stats.lognorm(0.7, scale=math.exp(0.5))),
    "exponential": (lambda t: t.exponential_(2.5), stats.expon(scale=1 / 2.5)),
    "cauchy": (lambda t: t.cauchy_(1, 3), stats.cauchy(1, 3)),
    "rand": (lambda t: torch.rand_like(t), stats.uniform(0, 1)),
    "randn": (lambda t: torch.randn_like(t), stats.norm(0, 1)),
    "gamma_small": (lambda t: torch._standard_gamma(t.fill_(0.3)), stats.gamma(0.3)),
    "gamma": (lambda t: torch._standard_gamma(t.fill_(4.5)), stats.gamma(4.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distribution(name: str, dtype: torch.dtype) -> None:
    fill, distribution = CONTINUOUS[name]
    assert stats.kstest(drawn(fill, dtype), distribution.cdf).pvalue > LEVEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    uniform = drawn(lambda t: t.uniform_(), dtype)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    normal = drawn(lambda t: t.normal_(1, 2), dtype)
    assert abs(normal.mean() - 1) < 0.06
    assert abs(normal.std() - 2) < 0.06


def test_complex() -> None:
    with no_fallback():
        z = torch.randn(COUNT, dtype=torch.complex64, device="tpu").cpu().numpy()
        w = torch.rand(COUNT, dtype=torch.complex128, device="tpu").cpu().numpy()
    for part in (z.real, z.imag):
        assert stats.kstest(part, stats.norm(0, math.sqrt(0.5)).cdf).pvalue > LEVEL
    for part in (w.real, w.imag):
        assert stats.kstest(part, stats.uniform().cdf).pvalue > LEVEL
    assert abs(np.corrcoef(z.real, z.imag)[0, 1]) < 0.03


def fits(sample: np.ndarray, distribution: object) -> None:
    """A chi-squared test over the values that are expected at least ten times, the others together."""
    values, counts = np.unique(sample, return_counts=True)
    expected = distribution.pmf(values) * sample.size  # type: ignore[attr-defined]
    common = expected >= 10
    observed, wanted = counts[common], expected[common]
    rest = sample.size - wanted.sum()
    if rest > 1:
        observed, wanted = np.append(observed, counts[~common].sum()), np.append(wanted, rest)
    assert observed.sum() == sample.size
    assert stats.chisquare(observed, wanted, sum_check=False).pvalue > LEVEL


DISCRETE = {
    "bernoulli": (lambda t: t.bernoulli_(0.3), stats.bernoulli(0.3)),
    "bernoulli_tensor": (lambda t: t.bernoulli_(torch.full_like(t, 0.8)), stats.bernoulli(0.8)),
    "geometric": (lambda t: t.geometric_(0.3), stats.geom(0.3)),
    "random": (lambda t: t.random_(-5, 20), stats.randint(-5, 20)),
    "poisson_small": (lambda t: torch.poisson(t.fill_(2.5)), stats.poisson(2.5)),
    "poisson_large": (lambda t: torch.poisson(t.fill_(37.0)), stats.poisson(37)),
    "binomial_small": (lambda t: torch.binomial(t.fill_(12), torch.full_like(t, 0.3)), stats.binom(12, 0.3)),
    "binomial_large": (lambda t: torch.binomial(t.fill_(100), torch.full_like(t, 0.35)), stats.binom(100, 0.35)),
    "binomial_mirrored": (lambda t: torch.binomial(t.fill_(60), torch.full_like(t, 0.75)), stats.binom(60, 0.75)),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distribution(name: str) -> None:
    fill, distribution = DISCRETE[name]
    fits(drawn(fill), distribution)


def test_counts_at_the_edges() -> None:
    t = lambda *v: torch.tensor(v, device="tpu")  # noqa: E731
    assert torch.poisson(t(0.0, 0.0)).tolist() == [0, 0]
    assert torch.binomial(t(0.0, 5.0, 5.0, 1000.0), t(0.5, 0.0, 1.0, 1.0)).tolist() == [0, 0, 5, 1000]
    assert torch.bernoulli(t(0.0, 1.0)).tolist() == [0, 1]
    assert torch.poisson(torch.ones(0, device="tpu")).shape == (0,)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.float32]
)
def test_random_covers_the_dtype(dtype: torch.dtype) -> None:
    sample = drawn(lambda t: t.random_(), dtype)
    top = 1 if dtype is torch.bool else 2**24 if dtype is torch.float32 else torch.iinfo(dtype).max
    assert 0 <= sample.min() <= top * 0.01
    assert top * 0.99 <= sample.max() <= top
    if top > 2**10:
        assert stats.kstest(sample / top, stats.uniform().cdf).pvalue > LEVEL


def test_randint_ranges() -> None:
    with no_fallback():
        wide = torch.empty(COUNT, dtype=torch.int64, device="tpu").random_(-(2**63), None).cpu().double().numpy()
        narrow = torch.randint(10, 13, (COUNT,), device="tpu")
    assert stats.kstest(wide / 2.0**64 + 0.5, stats.uniform().cdf).pvalue > LEVEL
    assert narrow.unique().tolist() == [10, 11, 12]
    assert torch.randint_like(narrow, 5).max().item() == 4
    assert torch.randint(3, (2,), dtype=torch.int32, device="tpu").dtype is torch.int32


def test_changing_bounds_does_not_recompile() -> None:
    t = torch.empty(64, device="tpu")
    t.uniform_(0.5, 2)
    torch.randint(3, 9, (64,), device="tpu")
    F.dropout(t, 0.3)
    before = metrics.counters().get("program", 0)
    for i in range(2, 6):
        assert t.uniform_(i, i + 1).cpu().floor().eq(i).all()
        assert torch.randint(i, i + 2, (64,), device="tpu").cpu().unique().tolist() == [i, i + 1]
        F.dropout(t, 0.1 * i)
    assert metrics.counters().get("program", 0) == before


def test_normal_of_tensors() -> None:
    mean, std = torch.arange(4.0, device="tpu").repeat(5000), torch.tensor([1.0, 2.0], device="tpu").repeat(10000)
    with no_fallback():
        results = [torch.normal(mean, std), torch.normal(mean, 1.0), torch.normal(0.0, std)]
        single = torch.normal(2.0, 3.0, (COUNT,), device="tpu")
    for result, m, s in zip(results, (mean, mean, 0.0), (std, 1.0, std), strict=True):
        assert stats.kstest(((result - m) / s).cpu().numpy(), stats.norm().cdf).pvalue > LEVEL
    assert stats.kstest(single.cpu().numpy(), stats.norm(2, 3).cdf).pvalue > LEVEL
    with pytest.raises(RuntimeError, match=r"normal expects all elements of std >= 0\.0"):
        torch.normal(mean, -std)


# --- permutations and categories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 70000])
def test_randperm_is_a_permutation(n: int) -> None:
    with no_fallback():
        p = torch.randperm(n, device="tpu")
    assert p.dtype is torch.int64
    assert torch.equal(p.cpu().sort().values, torch.arange(n))
    assert n < 1000 or not torch.equal(p.cpu(), torch.randperm(n, device="tpu").cpu())


def test_randperm_orders_are_equally_likely() -> None:
    orders = [tuple(torch.randperm(3, device="tpu").tolist()) for _ in range(600)]
    assert stats.chisquare(np.unique(orders, axis=0, return_counts=True)[1]).pvalue > LEVEL
    assert torch.randperm(5, dtype=torch.int32, device="tpu").dtype is torch.int32


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_multinomial(replacement: bool, dtype: torch.dtype) -> None:
    p = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0], dtype=dtype, device="tpu")
    with no_fallback():
        first = torch.multinomial(p.expand(COUNT, 6), 1, replacement)
        several = torch.multinomial(p.expand(500, 6), 3, replacement)
    assert first.shape == (COUNT, 1)
    counts = np.bincount(first.flatten().cpu().numpy(), minlength=6)
    assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[[1, 2, 4]], COUNT * np.array([1, 3, 4]) / 8).pvalue > LEVEL
    rows = [set(r) for r in several.tolist()]
    assert set.union(*rows) == {1, 2, 4}
    assert (min(map(len, rows)) == 3) is not replacement


def test_multinomial_errors() -> None:
    p = torch.ones(3, device="tpu")
    for bad, words in ((-p, r"element < 0"), (p * 0, r"sum of probabilities <= 0")):
        with pytest.raises(RuntimeError, match=words):
            torch.multinomial(bad, 1)
    for bad in (p / 0, p * float("nan"), torch.tensor([3.0, -1.0, 1.0], device="tpu")):
        with pytest.raises(RuntimeError, match="either `inf`, `nan` or element < 0"):
            torch.multinomial(bad, 1, True)
    with pytest.raises(RuntimeError, match="cannot sample n_sample > prob_dist"):
        torch.multinomial(p, 4)
    with pytest.raises(RuntimeError, match="n_sample <= 0"):
        torch.multinomial(p, 0)


def test_dirichlet() -> None:
    alpha = torch.tensor([0.5, 1.0, 3.5], device="tpu")
    with no_fallback():
        x = torch._sample_dirichlet(alpha.expand(COUNT, 3).contiguous()).cpu()
    torch.testing.assert_close(x.sum(1), torch.ones(COUNT))
    assert stats.kstest(x[:, 0].numpy(), stats.beta(0.5, 4.5).cdf).pvalue > LEVEL


# --- dropout -----------------------------------------------------------------------------------------------------


def test_dropout_varies_per_call() -> None:
    x = torch.ones(64, 64, device="tpu")
    layer = torch.nn.Dropout(0.25)
    with no_fallback():
        masks = [(layer(x) * 3).cpu() for _ in range(4)]
    for i, mask in enumerate(masks):
        assert {round(v, 3) for v in mask.unique().tolist()} == {0.0, 4.0}
        assert 0.2 < (mask == 0).float().mean() < 0.3
        assert not any(torch.equal(mask, other) for other in masks[:i])
    assert torch.equal(layer.eval()(x).cpu(), x.cpu())


def test_dropout_gradient_has_the_same_mask() -> None:
    x = torch.ones(1000, device="tpu", requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_dropout_at_the_edges() -> None:
    x = torch.tensor([1.0, float("inf")], device="tpu")
    assert torch.native_dropout(x, 1.0, True)[0].tolist() == [0, 0]
    y, mask = torch.native_dropout(x, 0.5, False)
    assert y.tolist() == x.tolist()
    assert mask.dtype is torch.bool
    assert mask.tolist() == [True, True]
    assert F.dropout(torch.ones(0, 3, device="tpu")).shape == (0, 3)
    assert F.dropout(torch.ones(100, device="tpu", dtype=torch.bfloat16), 0.5).unique().tolist() == [0, 2]


@pytest.mark.parametrize(
    "layer", [torch.nn.Dropout1d, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout, torch.nn.RReLU]
)
def test_other_noise_layers(layer: type[torch.nn.Module]) -> None:
    x = torch.full((50, 20, 4), -1.0, device="tpu", requires_grad=True)
    with no_fallback():
        y = layer()(x)
        y.sum().backward()
    assert y.unique().numel() > 1
    assert x.grad.unique().numel() > 1


# --- generators --------------------------------------------------------------------------------------------------


def some(generator: torch.Generator | None = None) -> list[float]:
    t = torch.empty(5, device="tpu")
    parts = [t.normal_(generator=generator), t.clone().uniform_(generator=generator)]
    parts.append(torch.randperm(5, generator=generator, device="tpu").float())
    parts.append(torch.poisson(torch.full((5,), 20.0, device="tpu"), generator=generator))
    parts.append(torch.multinomial(torch.ones(9, device="tpu"), 5, generator=generator).float())
    return torch.cat(parts).tolist()


def test_seed_repeats() -> None:
    torch.manual_seed(7)
    first, second = some(), some()
    torch.manual_seed(7)
    assert some() == first
    assert first != second


def test_fork_rng_restores() -> None:
    torch.manual_seed(7)
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        inside = some()
    assert some() == inside


def test_own_generator() -> None:
    torch.manual_seed(7)
    before = torch.tpu.get_rng_state()
    a, b = torch.Generator("tpu").manual_seed(5), torch.Generator("tpu").manual_seed(5)
    assert some(a) == some(b)
    assert torch.equal(torch.tpu.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator"):
        torch.empty(2, device="tpu").normal_(generator=torch.Generator())


def test_draws_in_one_program_and_in_two_are_the_same_stream() -> None:
    """Bits depend on the position in the stream only: sixteen numbers at once, or in four calls."""
    torch.manual_seed(3)
    whole = torch.rand(16, device="tpu").tolist()
    torch.manual_seed(3)
    assert [v for _ in range(4) for v in torch.rand(4, device="tpu").tolist()] == whole


def test_philox_known_answer() -> None:
    """The first vector of Random123's kat_vectors for philox4x32-10: counter 0, key 0."""
    torch.manual_seed(0)
    got = torch.rand(4, dtype=torch.float32, device="tpu").tolist()
    assert got == [(w >> 8) * 2.0**-24 for w in (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)]


ERRORS = [
    (lambda t: t.uniform_(2, 1), r"uniform_ expects to return a \[from, to\) range"),
    (lambda t: t.normal_(0, -1), "normal expects std >= 0.0"),
    (lambda t: t.exponential_(-1), "exponential_ expects lambda > 0.0"),
    (lambda t: t.geometric_(2), "geometric_ expects p"),
    (lambda t: t.cauchy_(0, 0), "cauchy_ expects sigma > 0.0"),
    (lambda t: t.log_normal_(0, 0), "log_normal_ expects std > 0.0"),
    (lambda t: t.bernoulli_(1.5), "bernoulli_ expects p"),
    (lambda t: t.random_(5, 5), "random_ expects 'from' to be less than 'to'"),
    (lambda t: t.to(torch.uint8).random_(0, 1000), "out of bounds"),
    (lambda t: t.long().normal_(), "not implemented for 'Long'"),
]


@pytest.mark.parametrize(("wrong", "message"), ERRORS)
def test_argument_errors(wrong: Callable[[torch.Tensor], object], message: str) -> None:
    t = torch.ones(3, device="tpu")
    t.uniform_(0, 1).normal_(0, 1).exponential_(1).bernoulli_(0.5)  # programs that take any numbers exist
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        wrong(t)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_gradient_of_dropout_by_a_mask_and_a_scale(dtype: torch.dtype) -> None:
    """Integers are multiplied by the scale as it is, and become float32."""
    mask = torch.tensor([True, True, False, True])
    check(torch.ops.aten.native_dropout_backward, torch.tensor([1, 0, 3, 2]).to(dtype), mask, 1.5)
