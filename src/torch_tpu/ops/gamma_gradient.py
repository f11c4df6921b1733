"""How a gamma, beta or Dirichlet variate moves with its parameters: -(dF/dα) / f, distribution function F, density f.

Approximations by M. Jankowiak and F. Obermeyer (Pathwise Derivatives Beyond the Reparameterization Trick, 2018), as
PyTorch has them: a series where the variate is small, a saddle point expansion where the parameters are large, and a
rational function of logarithms in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.registry import lower
from torch_tpu.ops.special import digamma

# Coefficients of vʲ in the numerator and the denominator, for each power of u.
GAMMA_P = (
    (0.16009398, -0.094634809, 0.025146376, -0.0030648343),
    (0.53487893, 0.1298071, 0.065735949, -0.0015649758),
    (0.040121004, -0.0065914022, -0.0026286047, -0.0013441777),
)
GAMMA_Q = (
    (1.0, 0.32668115, 0.10406089, 0.0014179084),
    (0.16639465, 0.020070113, -0.0035938915, -0.00058392623),
    (0.017050642, -0.0021309326, 0.00085092367, -1.5247877e-07),
)
# Coefficients of bᵏ, for each power of u and, within it, of a.
BETA_P = (
    (
        (1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
        (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
        (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013),
    ),
    (
        (0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
        (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
        (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05),
    ),
    (
        (-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
        (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
        (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05),
    ),
)
BETA_Q = (
    (
        (1.0, -0.02924021934, -0.04438342661, 0.007285809825),
        (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
        (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149),
    ),
    (
        (0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
        (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
        (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05),
    ),
    (
        (0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
        (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
        (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06),
    ),
)


def _polynomial(coefficients: Sequence[Array | float], x: Array) -> Array:
    """Σ cᵢ xⁱ."""
    result = hlo.as_array(coefficients[-1], x.dtype)
    for c in coefficients[-2::-1]:
        result = result * x + c
    return result


def _zero_for_nan(x: Array) -> Array:
    return hlo.select(hlo.is_nan(x), 0, x)


@lower("_standard_gamma_grad")
def standard_gamma_grad(alpha: Array, x: Array) -> Array:
    """By α, for a variate x of Gamma(α, 1)."""
    dtype = x.dtype
    alpha, x = (hlo.convert(v, torch.float64) for v in (alpha, x))
    u = hlo.log(x / alpha)
    v = hlo.log(alpha)
    numerator, denominator = (_polynomial([_polynomial(c, v) for c in table], u) for table in (GAMMA_P, GAMMA_Q))
    result = hlo.exp(numerator / denominator)
    result = hlo.select(alpha > 8, _gamma_of_large_shape(alpha, x), result)
    return hlo.convert(hlo.select(x < 0.8, _gamma_of_small_value(alpha, x), result), dtype)


def _gamma_of_small_value(alpha: Array, x: Array) -> Array:
    """From F = xᵅ Σ (-x)ⁱ / (i! (α + i)), divided by Γ(α)."""
    first, second = hlo.full_like(x, 0), hlo.full_like(x, 0)
    for i in range(6):
        term = _polynomial([0.0] * i + [(-1) ** i / math.factorial(i)], x)
        first = first + term / (alpha + i)
        second = second + term / hlo.square(alpha + i)
    by_density = x * hlo.exp(x)
    return _zero_for_nan(-((hlo.log(x) - digamma(alpha)) * first - second) * by_density)


def _gamma_of_large_shape(alpha: Array, x: Array) -> Array:
    square = alpha * alpha
    near = (1 + 24 * alpha * (1 + 12 * alpha)) / (1244160 * square * square)
    near = near * (1440 * square + 6 * x * (53 - 120 * x) - 65 * x * x / alpha + alpha * (107 + 3600 * x))
    scale = hlo.sqrt(8 * alpha)
    u = hlo.log(x / alpha)
    beside = hlo.power(x - alpha - alpha * u, -1.5)
    bracket = scale / (alpha - x) + hlo.select(x < alpha, -beside, beside)
    far = u * bracket - hlo.sqrt(2 / alpha) * (alpha + x) / hlo.square(alpha - x)
    stirling = 1 + 1 / (12 * alpha) * (1 + 1 / (24 * alpha))
    # The expansion has a hole at x = α.
    return hlo.select((0.9 * alpha <= x) & (x <= 1.1 * alpha), near, -stirling * x * far / scale)


@lower("_dirichlet_grad")
def dirichlet_grad(x: Array, alpha: Array, total: Array) -> Array:
    """By α, scaled by 1 / (1 - x), for a variate x of Beta(α, total - α)."""
    dtype, shape = x.dtype, hlo.broadcast_shapes(x.shape, alpha.shape, total.shape)
    x, alpha, total = (hlo.broadcast_to(hlo.convert(v, torch.float64), shape) for v in (x, alpha, total))
    beta, boundary = total - alpha, total * x * (1 - x)
    result = hlo.select((alpha > 6) & (beta > 6), _beta_of_large_shapes(x, alpha, beta), _beta_between(x, alpha, total))
    result = hlo.select((x >= 0.5) & (boundary < 0.75), -_beta_by_second(1 - x, beta, alpha), result)
    result = hlo.select((x <= 0.5) & (boundary < 2.5), _beta_by_first(x, alpha, beta), result)
    return hlo.convert(result, dtype)


def _beta_by_first(x: Array, alpha: Array, beta: Array) -> Array:
    """By α, for x near 0."""
    factor = digamma(alpha) - digamma(alpha + beta) - hlo.log(x)
    numerator = hlo.full_like(x, 1)
    series = (factor + 1 / alpha) / alpha
    for i in range(1, 11):
        numerator = numerator * ((i - beta) * x / i)
        series = series + numerator / (alpha + i) * (factor + 1 / (alpha + i))
    return _zero_for_nan(x * hlo.power(1 - x, -beta) * series)


def _beta_by_second(x: Array, alpha: Array, beta: Array) -> Array:
    """By β, for x near 0."""
    factor = digamma(alpha + beta) - digamma(beta)
    numerator, product, derivative = hlo.full_like(x, 1), hlo.full_like(x, 1), hlo.full_like(x, 0)
    series = factor / alpha
    for i in range(1, 9):
        numerator = numerator * (-x / i)
        derivative = derivative * (beta - i) + product
        product = product * (beta - i)
        series = series + numerator / (alpha + i) * (derivative + factor * product)
    return _zero_for_nan(-hlo.power(1 - x, 1 - beta) * series)


def _beta_of_large_shapes(x: Array, alpha: Array, beta: Array) -> Array:
    total = alpha + beta
    mean = alpha / total
    deviation = hlo.sqrt(alpha * beta / (total + 1)) / total

    square = beta * beta
    coefficients: list[Array | float] = [
        47 * x * square * square,
        (43 + 20 * (16 + 27 * beta) * x) * square * beta,
        3 * (59 + 180 * beta - 90 * x) * square,
        (453 + 1620 * beta * (1 - x) - 455 * x) * beta,
        8 * (1 - x) * (135 * beta - 11),
    ]
    near = (1 + 12 * alpha) * (1 + 12 * beta) / (total * total) / (1 - x) * _polynomial(coefficients, alpha)
    near = near / (12960 * alpha * alpha * alpha * square * (1 + 12 * total))

    def stirling(a: Array) -> Array:
        return 1 + 1 / (12 * a) + 1 / (288 * a * a)

    scale = -x / hlo.sqrt(2 * alpha * beta / total) * (stirling(alpha) * stirling(beta) / stirling(total))
    gap = alpha * (x - 1) + beta * x
    first = 2 * alpha * alpha * (x - 1) + alpha * beta * (x - 1) - x * square
    first = first / (hlo.sqrt(2 * alpha / beta) * hlo.power(total, 1.5) * gap * gap)
    log_ratio = hlo.log(alpha / (total * x))
    beside = hlo.power(beta * hlo.log(beta / (total * (1 - x))) + alpha * log_ratio, -1.5)
    bracket = hlo.sqrt(8 * alpha * beta / total) / gap + hlo.select(x < mean, beside, -beside)
    far = scale * (first + 0.5 * log_ratio * bracket)
    # The expansion has a hole at the mean.
    return hlo.select(hlo.abs_(x - mean) <= 0.1 * deviation, near, far)


def _beta_between(x: Array, alpha: Array, total: Array) -> Array:
    u = hlo.log(x)
    a = hlo.log(alpha) - u
    b = hlo.log(total) - a
    p, q = (
        _polynomial([_polynomial([_polynomial(c, b) for c in t], a) for t in table], u) for table in (BETA_P, BETA_Q)
    )
    return p / q * (x * (digamma(total) - digamma(alpha)) / (total - alpha))
