"""Bessel functions of order 0 and 1 and the Airy function, by the approximations PyTorch takes from Cephes."""

from __future__ import annotations

import math

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import elementwise
from torch_tpu.ops.math import cephes
from torch_tpu.ops.special import polynomial, rational


def _chebyshev(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Clenshaw's sum of a Chebyshev series in x/2, highest order first, the constant term halved."""
    previous, last = hlo.full_like(x, 0), hlo.full_like(x, coefficients[0])
    before = previous
    for c in coefficients[1:]:
        before, previous = previous, last
        last = x * previous - before + c
    return 0.5 * (last - before)


# --- modified ----------------------------------------------------------------------------------------------------


@elementwise("special_i0e")
def i0e(x: Array) -> Array:
    x = hlo.abs_(x)
    small = _chebyshev(x * 0.5 - 2, cephes.I0E_SMALL)
    large = _chebyshev(32 / x - 2, cephes.I0E_LARGE) * hlo.rsqrt(x)
    return hlo.select(x <= 8, small, large)


@elementwise("i0", "special_modified_bessel_i0")
def i0(x: Array) -> Array:
    return hlo.exp(hlo.abs_(x)) * i0e(x)


@elementwise("special_i1e")
def i1e(x: Array) -> Array:
    return hlo.bessel_i1e(x)


@elementwise("special_i1", "special_modified_bessel_i1")
def i1(x: Array) -> Array:
    return hlo.exp(hlo.abs_(x)) * i1e(x)


def _second_kind(x: Array, small: Array, large: Array) -> Array:
    """One formula up to 2, another beyond; ∞ at 0, NaN below."""
    result = hlo.select(x <= 2, small, large)
    return hlo.select(x.eq(0), math.inf, hlo.select(x < 0, math.nan, result))


def _k0_small(x: Array) -> Array:
    return _chebyshev(x * x - 2, cephes.K0_SMALL) - hlo.log(0.5 * x) * i0(x)


def _k1_small(x: Array) -> Array:
    return hlo.log(0.5 * x) * i1(x) + _chebyshev(x * x - 2, cephes.K1_SMALL) / x


def _k_large(x: Array, coefficients: tuple[float, ...]) -> Array:
    return _chebyshev(8 / x - 2, coefficients) / hlo.sqrt(x)


@elementwise("special_modified_bessel_k0")
def k0(x: Array) -> Array:
    return _second_kind(x, _k0_small(x), hlo.exp(-x) * _k_large(x, cephes.K0_LARGE))


@elementwise("special_modified_bessel_k1")
def k1(x: Array) -> Array:
    return _second_kind(x, _k1_small(x), hlo.exp(-x) * _k_large(x, cephes.K1_LARGE))


@elementwise("special_scaled_modified_bessel_k0")
def k0e(x: Array) -> Array:
    return _second_kind(x, _k0_small(x) * hlo.exp(x), _k_large(x, cephes.K0_LARGE))


@elementwise("special_scaled_modified_bessel_k1")
def k1e(x: Array) -> Array:
    return _second_kind(x, _k1_small(x) * hlo.exp(x), _k_large(x, cephes.K1_LARGE))


# --- first and second kind ---------------------------------------------------------------------------------------


def _oscillation(x: Array, order: int) -> tuple[Array, Array]:
    """Beyond 5: modulus times the cosine (first kind) and the sine (second kind) of the phase."""
    tables = (
        (cephes.J0_PP, cephes.J0_PQ, cephes.J0_QP, cephes.J0_QQ)
        if order == 0
        else (cephes.J1_PP, cephes.J1_PQ, cephes.J1_QP, cephes.J1_QQ)
    )
    t = 25 / (x * x)
    p = rational(t, *tables[:2])
    q = 5 / x * rational(t, *tables[2:])
    phase = x - (0.25 + 0.5 * order) * math.pi
    scale = math.sqrt(2 / math.pi) / hlo.sqrt(x)
    cosine, sine = hlo.cos(phase), hlo.sin(phase)
    return (p * cosine - q * sine) * scale, (p * sine + q * cosine) * scale


@elementwise("special_bessel_j0")
def j0(x: Array) -> Array:
    x = hlo.abs_(x)
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = near * rational(square, cephes.J0_RP, cephes.J0_RQ)
    near = hlo.select(x < 1e-5, 1 - square * 0.25, near)
    return hlo.select(x <= 5, near, _oscillation(x, 0)[0])


@elementwise("special_bessel_j1")
def j1(x: Array) -> Array:
    size = hlo.abs_(x)
    square = size * size
    near = rational(square, cephes.J1_RP, cephes.J1_RQ) * size
    near = near * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    result = hlo.select(size <= 5, near, _oscillation(size, 1)[0])
    return hlo.select(x < 0, -result, result)


def _second_kind_oscillating(x: Array, near: Array, far: Array) -> Array:
    result = hlo.select(x <= 5, near, far)
    return hlo.select(x.eq(0), -math.inf, hlo.select(x < 0, math.nan, result))


@elementwise("special_bessel_y0")
def y0(x: Array) -> Array:
    near = rational(x * x, cephes.Y0_YP, cephes.Y0_YQ) + 2 / math.pi * hlo.log(x) * j0(x)
    return _second_kind_oscillating(x, near, _oscillation(x, 0)[1])


@elementwise("special_bessel_y1")
def y1(x: Array) -> Array:
    near = x * rational(x * x, cephes.Y1_YP, cephes.Y1_YQ) + 2 / math.pi * (j1(x) * hlo.log(x) - 1 / x)
    return _second_kind_oscillating(x, near, _oscillation(x, 1)[1])


@elementwise("special_spherical_bessel_j0")
def spherical_j0(x: Array) -> Array:
    """sin(x)/x, near 0 by its Taylor series."""
    taylor = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1))
    result = hlo.select(hlo.abs_(x) < 0.5, polynomial(x * x, taylor), hlo.sin(x) / x)
    return hlo.select(hlo.abs_(x).eq(math.inf), 0, result)


@elementwise("special_airy_ai")
def airy_ai(x: Array) -> Array:
    """Asymptotic beyond ±2.09, the Maclaurin series between; NaN at ±∞, as on the CPU."""
    size = hlo.abs_(x)
    root = hlo.sqrt(size)
    zeta = size * root * (2 / 3)
    z = 1 / zeta
    quarter = hlo.sqrt(root)
    amplitude = 1 / math.sqrt(math.pi)

    decaying = amplitude * rational(z, cephes.AIRY_AN, cephes.AIRY_AD) / (2 * quarter * hlo.exp(zeta))
    f = 1 + z * z * rational(z * z, cephes.AIRY_AFN, cephes.AIRY_AFD)
    g = z * rational(z * z, cephes.AIRY_AGN, cephes.AIRY_AGD)
    phase = zeta + math.pi / 4
    oscillating = amplitude / quarter * (hlo.sin(phase) * f - hlo.cos(phase) * g)

    # Ai(x) = Ai(0) F(x³) + Ai'(0) x G(x³).
    f_terms, g_terms = [1.0], [1.0]
    for k in range(1, 16):
        f_terms.append(f_terms[-1] / ((3 * k - 1) * (3 * k)))
        g_terms.append(g_terms[-1] / ((3 * k) * (3 * k + 1)))
    cube = x * x * x
    middle = 0.355028053887817239260 * polynomial(cube, tuple(reversed(f_terms)))
    middle = middle - 0.258819403792806798405 * x * polynomial(cube, tuple(reversed(g_terms)))

    result = hlo.select(x < -2.09, oscillating, hlo.select(x < 2.09, middle, decaying))
    result = hlo.select(x > 103.892, 0, result)
    return hlo.select(size.eq(math.inf), math.nan, result)
