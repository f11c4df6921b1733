"""Activation functions and their derivatives."""

from __future__ import annotations

import math
from functools import cache

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype, elementwise
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.registry import Spec, decompose, lower, negative

# --- piecewise linear --------------------------------------------------------------------------------------------


@elementwise("threshold")
def threshold(x: Array, threshold: ArrayLike, value: ArrayLike) -> Array:
    return hlo.select(x <= threshold, value, x)


@elementwise("threshold_backward")
def threshold_backward(grad: Array, x: Array, threshold: ArrayLike) -> Array:
    return hlo.select(x <= threshold, 0, grad)


@elementwise("leaky_relu")
def leaky_relu(x: Array, negative_slope: ArrayLike = 0.01) -> Array:
    return hlo.select(x > 0, x, x * negative_slope)


@elementwise("leaky_relu_backward", static={"negative_slope": negative})
def leaky_relu_backward(grad: Array, x: Array, negative_slope: ArrayLike, self_is_result: bool) -> Array:
    if self_is_result and not isinstance(negative_slope, Array) and negative(negative_slope):
        raise RuntimeError("In-place leakyReLu backward calculation is triggered with a negative slope")
    return hlo.select(x > 0, grad, grad * negative_slope)


@elementwise("hardtanh")
def hardtanh(x: Array, min_val: ArrayLike = -1, max_val: ArrayLike = 1) -> Array:
    return hlo.clamp(min_val, x, max_val)


@elementwise("hardtanh_backward")
def hardtanh_backward(grad: Array, x: Array, min_val: ArrayLike, max_val: ArrayLike) -> Array:
    return hlo.select((x <= min_val) | (x >= max_val), 0, grad)


@elementwise("hardsigmoid")
def hardsigmoid(x: Array) -> Array:
    return hlo.clamp(0, x + 3, 6) / 6


@elementwise("hardsigmoid_backward")
def hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return hlo.select((x > -3) & (x < 3), grad / 6, 0)


@elementwise("hardswish")
def hardswish(x: Array) -> Array:
    return x * hlo.clamp(0, x + 3, 6) / 6


@elementwise("hardswish_backward")
def hardswish_backward(grad: Array, x: Array) -> Array:
    return hlo.select(x <= -3, 0, hlo.select(x < 3, grad * (x / 3 + 0.5), grad))


@elementwise("hardshrink")
def hardshrink(x: Array, lambd: ArrayLike = 0.5) -> Array:
    return hlo.select(_shrunk(x, lambd), 0, x)


@elementwise("softshrink")
def softshrink(x: Array, lambd: ArrayLike = 0.5) -> Array:
    return hlo.select(_shrunk(x, lambd), 0, x - hlo.sign(x) * lambd)


@elementwise("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad: Array, x: Array, lambd: ArrayLike) -> Array:
    return hlo.select(_shrunk(x, lambd), 0, grad)


def _shrunk(x: Array, lambd: ArrayLike) -> Array:
    return (x >= -lambd) & (x <= lambd)


@elementwise("_prelu_kernel")
def prelu(x: Array, weight: Array) -> Array:
    return hlo.select(x > 0, x, weight * x)


@lower("_prelu_kernel_backward")
def prelu_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    grad, x, weight = cast([grad, x, weight], compute_dtype(x.dtype))
    return hlo.select(x > 0, grad, weight * grad), hlo.select(x > 0, 0, x * grad)


@lower("rrelu_with_noise", "rrelu_with_noise_")
def rrelu_with_noise(
    x: Array,
    noise: Array,
    low: ArrayLike = 0.125,
    high: ArrayLike = 1 / 3,
    training: bool = False,
    generator: None = None,
    *,
    out: Spec,
    rng: Rng,
) -> tuple[Array, Array | None]:
    dtype = compute_dtype(x.dtype)
    x, low, high = cast([x, low, high], dtype)
    if not training:
        return hlo.select(x > 0, x, x * ((low + high) / 2)), None
    slope = hlo.select(x <= 0, rng.uniform(x.shape, dtype) * (high - low) + low, 1)
    return x * slope, slope


@lower("rrelu_with_noise_functional")
def rrelu_with_noise_functional(
    x: Array,
    noise: Array,
    low: ArrayLike = 0.125,
    high: ArrayLike = 1 / 3,
    training: bool = False,
    generator: None = None,
    *,
    out: list[Spec],
    rng: Rng,
) -> tuple[Array, Array]:
    y, slope = rrelu_with_noise(x, noise, low, high, training, out=out[0], rng=rng)
    return y, noise if slope is None else slope


@elementwise("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad: Array,
    x: Array,
    noise: Array,
    low: Array | float,
    high: Array | float,
    training: bool,
    self_is_result: bool,
) -> Array:
    fixed = hlo.select(x > 0, grad, grad * ((low + high) / 2))
    if not training:
        return fixed
    width = high - low
    if isinstance(width, Array):
        return hlo.select(width > 1e-6, grad * noise, fixed)
    return grad * noise if width > 1e-6 else fixed


# --- exponential -------------------------------------------------------------------------------------------------


@elementwise("elu")
def elu(x: Array, alpha: ArrayLike = 1, scale: ArrayLike = 1, input_scale: ArrayLike = 1) -> Array:
    return hlo.select(x < 0, hlo.expm1(x * input_scale) * (alpha * scale), x * scale)


@elementwise("elu_backward", static={"alpha": negative})
def elu_backward(
    grad: Array, alpha: ArrayLike, scale: ArrayLike, input_scale: ArrayLike, is_result: bool, x: Array
) -> Array:
    if is_result and not isinstance(alpha, Array) and negative(alpha):
        raise RuntimeError("In-place elu backward calculation is triggered with a negative slope")
    coefficient = alpha * scale
    slope = (x + coefficient) if is_result else hlo.exp(x * input_scale) * coefficient
    return grad * hlo.select(x <= 0, slope * input_scale, scale + hlo.full_like(x, 0))


@elementwise("gelu")
def gelu(x: Array, approximate: str = "none", *, out: Spec) -> Array:
    result = x * _gelu_gate(x, approximate)
    if approximate == "none" and not math.isinf(_host_gelu_of_infinity(out.dtype)):
        return hlo.select(x.eq(math.inf), math.nan, result)
    return result


@cache
def _host_gelu_of_infinity(dtype: torch.dtype) -> float:
    """The vector kernels of PyTorch's CPU give NaN on some processors, its scalar kernels inf; results follow it."""
    return torch.nn.functional.gelu(torch.full((64,), math.inf, dtype=dtype))[0].item()


def _gelu_gate(x: Array, approximate: str) -> Array:
    """The normal distribution function Φ(x), or Hendrycks and Gimpel's approximation of it by tanh."""
    if approximate == "none":
        return 0.5 * (1 + hlo.erf(x * math.sqrt(0.5)))
    return 0.5 * (1 + hlo.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@elementwise("gelu_backward")
def gelu_backward(grad: Array, x: Array, approximate: str = "none") -> Array:
    gate = _gelu_gate(x, approximate)
    if approximate == "none":
        return grad * (gate + x * hlo.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return grad * (gate + x * inner * 2 * gate * (1 - gate))


@elementwise("silu")
def silu(x: Array) -> Array:
    return x * hlo.logistic(x)


@elementwise("silu_backward")
def silu_backward(grad: Array, x: Array) -> Array:
    gate = hlo.logistic(x)
    return grad * hlo.conj(gate * (1 + x * (1 - gate)))


@elementwise("mish")
def mish(x: Array) -> Array:
    return x * hlo.tanh(hlo.log1p(hlo.exp(x)))


@elementwise("mish_backward")
def mish_backward(grad: Array, x: Array) -> Array:
    gate = hlo.tanh(hlo.log1p(hlo.exp(x)))
    return grad * (gate + x * hlo.logistic(x) * (1 - gate * gate))


@elementwise("softplus")
def softplus(x: Array, beta: ArrayLike = 1, threshold: ArrayLike = 20) -> Array:
    return hlo.select(x * beta > threshold, x, hlo.log1p(hlo.exp(x * beta)) / beta)


@elementwise("softplus_backward")
def softplus_backward(grad: Array, x: Array, beta: ArrayLike, threshold: ArrayLike) -> Array:
    return hlo.select(x * beta > threshold, grad, grad * hlo.logistic(x * beta))


@lower("log_sigmoid_forward")
def log_sigmoid_forward(x: Array) -> tuple[Array, Array]:
    """The buffer, exp(-|x|), is what the CPU's kernel keeps for the derivative."""
    x = cast(x, compute_dtype(x.dtype))
    buffer = hlo.exp(-hlo.abs_(x))
    return hlo.minimum(x, 0) - hlo.log1p(buffer), buffer


@elementwise("log_sigmoid_backward")
def log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    return grad * hlo.logistic(-x)


@elementwise("sigmoid_backward")
def sigmoid_backward(grad: Array, y: Array) -> Array:
    return grad * hlo.conj((1 - y) * y)


@elementwise("tanh_backward")
def tanh_backward(grad: Array, y: Array) -> Array:
    return grad * hlo.conj(1 - y * y)


@elementwise("logit_backward")
def logit_backward(grad: Array, x: Array, eps: ArrayLike | None = None) -> Array:
    slope = grad / hlo.abs_(x * (1 - x))
    if eps is None:
        return hlo.select((x < 0) | (x > 1), math.nan, slope)
    return hlo.select((x < eps) | (x > 1 - eps), 0, slope)


# --- gated linear units ------------------------------------------------------------------------------------------


def _halves(x: Array, dim: int) -> tuple[Array, Array]:
    half = x.shape[dim] // 2
    return hlo.slice_in_dim(x, 0, half, dim=dim), hlo.slice_in_dim(x, half, 2 * half, dim=dim)


@elementwise("glu")
def glu(x: Array, dim: int = -1) -> Array:
    a, b = _halves(x, dim)
    return a * hlo.logistic(b)


@elementwise("glu_backward")
def glu_backward(grad: Array, x: Array, dim: int) -> Array:
    a, b = _halves(x, dim)
    gate = hlo.logistic(b)
    return hlo.concatenate([grad * gate, grad * a * gate * (1 - gate)], dim)


@elementwise("glu_jvp")
def glu_jvp(y: Array, x: Array, tangent: Array, dim: int) -> Array:
    _, b = _halves(x, dim)
    da, db = _halves(tangent, dim)
    return da * hlo.logistic(b) + db * y * (1 - hlo.logistic(b))


@elementwise("glu_backward_jvp")
def glu_backward_jvp(grad_x: Array, grad: Array, x: Array, dgrad: Array, dx: Array, dim: int) -> Array:
    """The derivative of `glu_backward` along (dgrad, dx)."""
    (a, b), (da, db) = _halves(x, dim), _halves(dx, dim)
    gate = hlo.logistic(b)
    slope = gate * (1 - gate)
    first = dgrad * gate + grad * slope * db
    second = dgrad * a * slope + grad * slope * (da + a * (1 - 2 * gate) * db)
    return hlo.concatenate([first, second], dim)


@decompose("_add_relu.Tensor", "_add_relu.Scalar")
def add_relu(x: torch.Tensor, y: torch.Tensor | float, alpha: float = 1) -> torch.Tensor:
    return torch.relu(torch.add(x, y, alpha=alpha))
