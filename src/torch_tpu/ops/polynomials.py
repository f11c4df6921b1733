"""Orthogonal polynomials of a tensor of degrees, by their three-term recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import elementwise
from torch_tpu.ops.elementwise import truncate

Step = Callable[[Array, Array, Array, Array], Array]
First = Callable[[Array], Array]


def _evaluate(x: Array, degree: Array, first: First, step: Step, highest: float) -> Array:
    """The polynomial of each element's degree, truncated to an integer; 0 below degree 0.

    Args:
        first: the polynomial of degree 1.
        step: of (k, x, p, q), polynomials p and q of degrees k-1 and k, the one of degree k+1.
        highest: beyond this degree PyTorch gives NaN.
    """
    shape = hlo.broadcast_shapes(x.shape, degree.shape)
    x, degree = hlo.broadcast_to(x, shape), truncate(hlo.broadcast_to(degree, shape))
    wanted = hlo.minimum(degree, highest)

    def unfinished(k: Array, p: Array, q: Array) -> Array:
        return structured.reduce_or(k < wanted, range(q.ndim))

    def body(k: Array, p: Array, q: Array) -> list[Array]:
        is_open = k < wanted
        return [k + 1, hlo.select(is_open, q, p), hlo.select(is_open, step(k, x, p, q), q)]

    result = structured.while_loop([hlo.constant(1, x.dtype), hlo.full_like(x, 1), first(x)], unfinished, body)[2]
    result = hlo.select(degree > highest, math.nan, result)
    return hlo.select(degree < 0, 0, hlo.select(degree.eq(0), 1, result))


def _chebyshev(k: Array, x: Array, p: Array, q: Array) -> Array:
    return 2 * x * q - p


# Degree 1 and the recurrence (Abramowitz and Stegun, table 22.7).
_FAMILIES: dict[str, tuple[First, Step]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda k, x, p, q: 2 * x * q - 2 * k * p),
    "hermite_polynomial_he": (lambda x: x, lambda k, x, p, q: x * q - k * p),
    "laguerre_polynomial_l": (lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1 - x) * q - k * p) / (k + 1)),
    "legendre_polynomial_p": (lambda x: x, lambda k, x, p, q: ((2 * k + 1) * x * q - k * p) / (k + 1)),
}


def _register(name: str, first: First, step: Step, substitute: First) -> None:
    @elementwise(f"special_{name}", f"special_{name}.x_scalar", f"special_{name}.n_scalar")
    def polynomial(x: ArrayLike, degree: ArrayLike) -> Array:
        like = x if isinstance(x, Array) else degree
        assert isinstance(like, Array)
        x, degree = (v if isinstance(v, Array) else hlo.constant(v, like.dtype) for v in (x, degree))
        highest = (512 if x.dtype.itemsize == 8 else 128) if name.startswith("hermite") else math.inf
        return _evaluate(substitute(x), degree, first, step, highest)


for _name, (_first, _step) in _FAMILIES.items():
    _register(_name, _first, _step, lambda x: x)
    if _name.startswith("chebyshev"):
        _register(f"shifted_{_name}", _first, _step, lambda x: 2 * x - 1)
