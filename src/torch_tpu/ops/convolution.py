"""Convolutions of one to three spatial dimensions, plain and transposed, and their gradients.

Everything is one StableHLO convolution in PyTorch's own order of dimensions (N, C, *spatial): measured on XLA:CPU, it
is as fast as channels-last with explicit transposes, and TPU compilers choose layouts by themselves. A flipped kernel
is a `reverse` before the convolution, because XLA:CPU runs `window_reversal` in a scalar loop (20 times slower).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.hlo.array import Array
from torch_tpu.ops.core.promotion import compute_dtype
from torch_tpu.ops.core.registry import Spec, decompose, lower
from torch_tpu.ops.math import convolution_on_cpu as on_cpu
from torch_tpu.ops.matmul import dot, precision
from torch_tpu.ops.pooling import per_dimension

Ints = Sequence[int]

# The rows of a TPU's vector register: so many channels take no more of it than one does.
_FEWEST_CHANNELS = 8


def _is_matrix_product(kernel: Ints, stride: Ints, padding: Ints, groups: int) -> bool:
    """Whether a convolution only mixes channels: twice as fast as a matrix product on XLA:CPU.

    A TPU's compiler fuses a convolution with what comes before and behind it, such as batch normalisation; a matrix
    product of transposed images it writes to memory in float32.
    """
    mixes_channels = groups == 1 and all(k == 1 for k in kernel) and all(s == 1 for s in stride) and not any(padding)
    return mixes_channels and module.target().platform == "cpu"


def _convolve(
    x: Array,
    kernel: Array,
    stride: Ints,
    padding: Sequence[tuple[int, int]],
    x_dilation: Ints,
    dilation: Ints,
    groups: int,
) -> Array:
    """x (N, C, …) with kernel (O, C/groups, …); accumulated and returned in PyTorch's accumulation dtype."""
    size = [
        (low + (length - 1) * spread + high - (k - 1) * d) // s + 1
        for (low, high), length, spread, k, d, s in zip(
            padding, x.shape[2:], x_dilation, kernel.shape[2:], dilation, stride, strict=True
        )
    ]
    if on_cpu.is_depthwise(groups, kernel.shape[1], kernel.shape[2:], size):
        return on_cpu.depthwise(on_cpu.padded(x, padding, x_dilation), kernel, size, stride, dilation)
    if (parts := on_cpu.parts(groups, size)) > 1:

        def one(x: Array, kernel: Array) -> Array:
            return _convolve(x, kernel, stride, padding, x_dilation, dilation, 1)

        return on_cpu.in_parts(x, kernel, groups, parts, one)
    if on_cpu.is_in_planes(len(size), size):
        x = on_cpu.padded(x, [padding[0], (0, 0), (0, 0)], [x_dilation[0], 1, 1])

        def in_plane(x: Array, kernel: Array) -> Array:
            return _convolve(x, kernel, stride[1:], padding[1:], x_dilation[1:], dilation[1:], groups)

        return on_cpu.in_planes(x, kernel, size[0], stride[0], dilation[0], in_plane)
    natural = tuple(range(x.ndim))
    return structured.convolution(
        x,
        kernel,
        layout=(natural, natural, natural),
        strides=stride,
        padding=padding,
        x_dilation=x_dilation,
        kernel_dilation=dilation,
        groups=groups,
        dtype=compute_dtype(x.dtype),
        precision=precision(),
    )


def _edges(
    size: Ints, kernel: Ints, x_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> list[tuple[int, int]]:
    """How far an x of `x_size` is padded (or cut) at both ends of each dimension for a result of `size`."""
    ends = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, stride, kernel, dilation, strict=True)]
    return [(low, end - length - low) for end, length, low in zip(ends, x_size, padding, strict=True)]


def correlate(x: Array, weight: Array, size: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Array:
    """What PyTorch calls convolution, with a result of spatial `size`; weight is (O, C/groups, *kernel)."""
    if _is_matrix_product(weight.shape[2:], stride, padding, groups) and tuple(size) == x.shape[2:]:
        product = dot(weight.reshape(*weight.shape[:2]), x, ([1], [1]))
        return hlo.transpose(product, (1, 0, *range(2, x.ndim)))
    edges = _edges(size, weight.shape[2:], x.shape[2:], stride, padding, dilation)
    return _convolve(x, weight, stride, edges, [1] * len(stride), dilation, groups)


def spread(y: Array, weight: Array, size: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Array:
    """The adjoint of `correlate` in x, for an x of spatial `size`: the input's gradient, or a transposed convolution.

    It is a convolution of y, dilated by the stride, with the kernel flipped and its channels exchanged within groups.
    """
    spatial = range(2, weight.ndim)
    kernel = weight.shape[2:]
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    exchanged = hlo.transpose(weight.reshape(groups, outputs, inputs, *kernel), (0, 2, 1, *(d + 1 for d in spatial)))
    exchanged = hlo.reverse(exchanged.reshape(groups * inputs, outputs, *kernel), spatial)
    if _is_matrix_product(kernel, stride, padding, groups) and tuple(size) == y.shape[2:]:
        return correlate(y, exchanged, size, stride, padding, dilation, groups)
    edges = []
    for i, length in enumerate(size):
        reach = dilation[i] * (kernel[i] - 1)
        low = reach - padding[i]
        edges.append((low, length + reach - low - ((y.shape[2 + i] - 1) * stride[i] + 1)))
    return _convolve(y, exchanged, [1] * len(stride), edges, stride, dilation, groups)


def weight_gradient(
    x: Array, y: Array, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Array:
    """The adjoint of `correlate` in the weight: x convolved with y, dilated by the stride; the batch is contracted.

    Groups of channels become feature groups: batch groups (as in JAX) are 12 times slower on XLA:CPU.
    """
    spatial = range(2, x.ndim)
    if _is_matrix_product(kernel, stride, padding, groups):
        contracted = [0, *spatial]
        return dot(y, x, (contracted, contracted)).reshape(y.shape[1], x.shape[1], *kernel)
    edges = _edges(y.shape[2:], kernel, x.shape[2:], stride, padding, dilation)
    batch, channels = x.shape[0], x.shape[1] // groups
    if on_cpu.is_depthwise(groups, channels, kernel, y.shape[2:]):
        x = on_cpu.padded(x, edges, [1] * len(kernel))
        return on_cpu.depthwise_weight_gradient(x, y, kernel, stride, dilation)
    if (parts := on_cpu.parts(groups, y.shape[2:])) > 1:

        def one(x: Array, y: Array) -> Array:
            return weight_gradient(x, y, kernel, stride, padding, dilation, 1)

        return on_cpu.weight_gradient_in_parts(x, y, groups, parts, one)
    x = hlo.transpose(x.reshape(batch, groups, channels, *x.shape[2:]), (2, 1, 0, *(d + 1 for d in spatial)))
    x = x.reshape(channels, groups * batch, *x.shape[3:])
    x = _with_channels_for_tpu(x)
    y = hlo.transpose(y, (1, 0, *spatial))
    gradient = _convolve(x, y, dilation, edges, [1] * len(kernel), stride, groups)
    if x.shape[0] > channels:
        gradient = hlo.slice_in_dim(structured.optimization_barrier(gradient), 0, channels)
    return hlo.transpose(gradient, (1, 0, *spatial))


def _with_channels_for_tpu(x: Array) -> Array:
    """x (C, N, …) with zeros for missing channels, where the TPU's compiler would take minutes without them.

    Float32 products are made of several bfloat16 ones. With few channels, the window, here as large as the image, is
    then unrolled: the gradient of a first layer for MNIST compiles for v5e in 68 s of a processor's time, with these
    zeros in 1 to 6 s. The barriers keep the compiler from taking them away again.
    """
    missing = _FEWEST_CHANNELS - x.shape[0]
    if missing <= 0 or module.target().platform != "tpu" or x.dtype is not torch.float32 or precision() == "DEFAULT":
        return x
    padded = hlo.pad(x, 0, [0] * x.ndim, [missing, *[0] * (x.ndim - 1)])
    return structured.optimization_barrier(padded)


def _check_transposed(stride: Ints, dilation: Ints, output_padding: Ints, sizes: Ints) -> None:
    """Raises what CPU kernels refuse and PyTorch's shape rule does not."""
    if any(p >= s and p >= d for p, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got output padding "
            f"{list(output_padding)}, stride {list(stride)} and dilation {list(dilation)}"
        )
    # Sizes of 0 are results for oneDNN, and refused by the CPU's kernel of float64 alone.
    if min(sizes, default=0) < 0:
        raise RuntimeError(f"Calculated output size per channel: {tuple(sizes)}. Output size is too small")


@lower("convolution_overrideable")
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    out: Spec,
) -> Array:
    if min(dilation, default=1) < 1:
        raise RuntimeError(f"dilation should be greater than zero, but got {list(dilation)}")
    if transposed:
        _check_transposed(stride, dilation, output_padding, out.shape[2:])
    adjoint_or_plain = spread if transposed else correlate
    result = adjoint_or_plain(x, weight, out.shape[2:], stride, padding, dilation, groups)
    if bias is not None:
        result = result + hlo.convert(bias, result.dtype).reshape(-1, *[1] * len(stride))
    return hlo.convert(result, x.dtype)


@lower("convolution_backward_overrideable")
def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Array | None]:
    kernel = weight.shape[2:]
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        adjoint_or_plain = correlate if transposed else spread
        grad_x = adjoint_or_plain(grad, weight, x.shape[2:], stride, padding, dilation, groups)
    if output_mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        grad_weight = weight_gradient(wide, narrow, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        wide_grad = hlo.convert(grad, compute_dtype(grad.dtype))
        grad_bias = structured.reduce_sum(wide_grad, [0, *range(2, grad.ndim)])
    return [grad_x, grad_weight, grad_bias]


# --- PyTorch's native variants -----------------------------------------------------------------------------------

# `convolution` and its gradient are left to PyTorch's C++ code, which checks the arguments, answers empty batches,
# turns 1-d into 2-d, and ends in the operators above; under a trace as well.


@decompose("_slow_conv2d_forward", "slow_conv3d_forward")
def _slow_convolution(
    x: torch.Tensor, weight: torch.Tensor, kernel_size: Ints, bias: torch.Tensor | None, stride: Ints, padding: Ints
) -> torch.Tensor:
    weight = weight.view(weight.shape[0], -1, *kernel_size)
    return torch.convolution(x, weight, bias, stride, padding, [1] * len(stride), False, [0] * len(stride), 1)


@decompose("_slow_conv2d_backward.output_mask")
def _slow_convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor | None, ...]:
    weight = weight.view(weight.shape[0], -1, *kernel_size)
    options: tuple[Any, ...] = (stride, padding, [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(grad, x, weight, [weight.shape[0]], *options, output_mask)


@decompose("slow_conv_dilated2d", "slow_conv_dilated3d")
def _dilated_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Ints,
    bias: torch.Tensor | None = None,
    stride: Ints | int = 1,
    padding: Ints | int = 0,
    dilation: Ints | int = 1,
) -> torch.Tensor:
    spatial = len(kernel_size)
    stride, padding, dilation = (per_dimension(v, spatial) for v in (stride, padding, dilation))
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * spatial, 1)


@decompose("slow_conv_transpose2d", "slow_conv_transpose3d")
def _transposed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Ints,
    bias: torch.Tensor | None = None,
    stride: Ints | int = 1,
    padding: Ints | int = 0,
    output_padding: Ints | int = 0,
    dilation: Ints | int = 1,
) -> torch.Tensor:
    options = (per_dimension(v, len(kernel_size)) for v in (stride, padding, output_padding, dilation))
    stride, padding, output_padding, dilation = options
    return torch.convolution(x, weight, bias, stride, padding, dilation, True, output_padding, 1)
