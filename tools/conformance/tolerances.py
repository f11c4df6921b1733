"""Every exception from "the device gives what the CPU gives, at torch.testing's default tolerances", with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Tolerance(NamedTuple):
    """Wider tolerances of an operator, for the dtypes named (none: all)."""

    rtol: float
    atol: float
    reason: str
    dtypes: tuple[str, ...] = ()


# Results of size 10 to 1e5 from terms that cancel. Measured against double precision, the CPU's float32 result is as
# far off as the device's, each in its own direction.
_CANCELS = "terms that cancel; the CPU's result is as far from the double-precision one"
_LARGE_POWER = "results of size 1e5 to 1e16: an error in the logarithm grows by its size; the CPU is as far off"
_F32 = ("float32",)
_SINGLE = ("float32", "complex64")
TOLERANCES: dict[str, Tolerance] = {
    "LBFGS": Tolerance(1e-4, 5e-4, "a step divides by differences of gradients that are nearly equal"),
    "addbmm": Tolerance(1.3e-6, 5e-5, _CANCELS, _SINGLE),
    "addcdiv": Tolerance(1.3e-6, 1e-4, _CANCELS, _F32),
    "baddbmm": Tolerance(1.3e-6, 2e-4, "results of size 1e3; " + _CANCELS, ("complex64",)),
    "cov": Tolerance(1.3e-6, 5e-5, _CANCELS, _SINGLE),
    "erfinv": Tolerance(1e-5, 1e-5, "the gradient is exp(erfinv²): an error of one bit grows by its size", _F32),
    "fft.hfft2": Tolerance(1.3e-6, 5e-5, _CANCELS, _SINGLE),
    "grid_sampler_2d": Tolerance(1.3e-6, 2e-4, _CANCELS, _F32),
    "grid_sampler_3d": Tolerance(1.3e-6, 5e-4, _CANCELS, _F32),
    "linalg.eigh": Tolerance(
        1e-5, 1e-4, "gradients of size 4 by differences of eigenvalues, off by 1e-5 (the CPU's by 1.8e-5)", _F32
    ),
    "linalg.lstsq": Tolerance(2e-5, 5e-4, "gradients of size 100; " + _CANCELS, _SINGLE),
    "linalg.multi_dot": Tolerance(1.3e-6, 1e-3, "gradients of size 1e4; " + _CANCELS, _SINGLE),
    "linalg.svd": Tolerance(1e-5, 2e-4, "gradients by differences of singular values; " + _CANCELS, _SINGLE),
    "linalg.cond": Tolerance(2.5e-6, 1e-4, _CANCELS, ("complex64",)),
    "linalg.householder_product": Tolerance(2e-4, 1e-3, "gradients of size 2.8e3; " + _CANCELS, _SINGLE),
    "linalg.pinv": Tolerance(2e-5, 5e-4, "gradients of size 120, by differences of eigenvalues; " + _CANCELS, _SINGLE),
    "logcumsumexp": Tolerance(1e-4, 3e-3, _CANCELS, _SINGLE),
    "matrix_exp": Tolerance(1e-5, 1e-1, "results of size 1e5 and more; the CPU's is further off", _SINGLE),
    "matmul": Tolerance(1.3e-6, 5e-5, _CANCELS, _F32),
    "native_layer_norm": Tolerance(1.3e-6, 2e-5, "of one element, whose gradient is 0: the CPU's is 1.4e-5", _F32),
    "nn.functional.conv2d": Tolerance(1.3e-6, 2e-4, "results of size 4e2; " + _CANCELS, ("complex64",)),
    "nn.functional.conv3d": Tolerance(1.3e-6, 5e-4, "results of size 1e3; " + _CANCELS, _SINGLE),
    "nn.functional.conv_transpose3d": Tolerance(1.3e-6, 1e-3, "results of size 1.6e3; " + _CANCELS, _SINGLE),
    "nn.functional.ctc_loss": Tolerance(1.3e-6, 2e-4, _CANCELS, _F32),
    "nn.functional.scaled_dot_product_attention": Tolerance(1.3e-6, 2e-4, _CANCELS, _F32),
    "nn.functional.poisson_nll_loss": Tolerance(3e-6, 1e-5, "sums of terms of both signs; " + _CANCELS, ("uint8",)),
    "nn.CTCLoss": Tolerance(1.3e-6, 2e-4, _CANCELS, _F32),
    "nn.Conv3d": Tolerance(1.3e-6, 1e-4, _CANCELS, _F32),
    "nn.LazyConv3d": Tolerance(1.3e-6, 1e-4, _CANCELS, _F32),
    "nn.MultiheadAttention": Tolerance(1.3e-6, 5e-5, _CANCELS, _F32),
    "nn.Transformer": Tolerance(1.3e-6, 5e-5, _CANCELS, _F32),
    "nn.TransformerDecoderLayer": Tolerance(1.3e-6, 5e-5, _CANCELS, _F32),
    "nn.ConvTranspose3d": Tolerance(1.3e-6, 1e-4, _CANCELS, _F32),
    "nn.LazyConvTranspose3d": Tolerance(1.3e-6, 1e-4, _CANCELS, _F32),
    "pow": Tolerance(7e-6, 1e-5, _LARGE_POWER, _SINGLE),
    "stft": Tolerance(1.3e-6, 2e-4, _CANCELS, _F32),
    "svd": Tolerance(1e-5, 2e-4, "gradients by differences of singular values; " + _CANCELS, _SINGLE),
    "triangular_solve": Tolerance(1e-5, 5e-4, "gradients of size 1e4; " + _CANCELS, _F32),
    "__rmatmul__": Tolerance(1.3e-6, 5e-5, _CANCELS, _F32),
    "__rpow__": Tolerance(1e-5, 1e-5, _LARGE_POWER, ("complex64",)),
    "_foreach_mm": Tolerance(1.3e-6, 1e-4, _CANCELS, _SINGLE),
    "_foreach_pow": Tolerance(5e-6, 1e-5, _LARGE_POWER, ("complex64",)),
}

# Results with values that nobody promises: only dtype, shape and strides are compared.
_RANDOM = "random: the device has another generator than the CPU"
_UNWRITTEN = "memory that nobody has written"
VALUES_UNDEFINED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bernoulli",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "nn.functional.alpha_dropout",
            "nn.functional.dropout",
            "nn.functional.dropout2d",
            "nn.functional.dropout3d",
            "nn.functional.feature_alpha_dropout",
            "nn.functional.fractional_max_pool2d",
            "nn.functional.fractional_max_pool3d",
            "nn.functional.rrelu",
            "normal",
            "pca_lowrank",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "svd_lowrank",
            "uniform",
        ),
        _RANDOM,
    ),
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), _UNWRITTEN
    ),
}

# Factorisations that are unique only up to signs or phases: what the database's own post-processing makes of them is
# compared, as in PyTorch's tests.
UP_TO_SIGN: frozenset[str] = frozenset({"linalg.eigh", "linalg.eig", "linalg.svd", "svd"})

# What the device has no form of at all.
_SPARSE = "the device has no sparse layouts"
_COMPLEX_HALF = "XLA has no complex number of two float16"
NOT_POSSIBLE: dict[str, str] = {
    "SparseAdam": _SPARSE,
    "chalf": _COMPLEX_HALF,
    "sparse.mm": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "to_sparse": _SPARSE,
}
NOT_POSSIBLE_IN: dict[tuple[str, str], str] = {
    ("complex", "float16"): _COMPLEX_HALF,
    ("view_as_complex", "float16"): _COMPLEX_HALF,
}

# Optimizers whose steps in these dtypes are decided by the last digit, so that no two ways of rounding agree.
CHAOTIC: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    "LBFGS": (
        (torch.bfloat16, torch.float16, torch.complex64),
        "a step divides by a difference of gradients, which has hardly a digit left; in complex64 they part by 3e-4",
    ),
}

# How many times the CPU's error a result in half precision may have that went through many operators, each of which
# rounds; by default 2 for gradients of modules and 4 for optimizers.
FACTORS: dict[str, tuple[float, str]] = {
    "nn.Transformer": (4, "gradients of two layers of width 4, by chance off by 0.008 (the CPU's by 0.0024)"),
    "NAdam differentiable": (8, "its capturable form goes through tensors, the CPU's loop through double precision"),
}

# What the database itself has samples for in fewer dtypes than it says.
FLOAT_SAMPLES: dict[str, str] = {
    "register_hook": "its samples want gradients, in integer dtypes as well",
}

# Operators that PyTorch gives everything but the first argument on the CPU, whatever the device.
HOST_ARGUMENTS: dict[str, str] = {
    "tensor_split": "it refuses sections or indices on a device, because it reads them to make the views",
}

# Samples of operators that are random only then.
RANDOM_SAMPLES: dict[str, Callable[[Any], bool]] = {
    "nn.functional.multi_head_attention_forward": lambda sample: sample.args[9] > 0,
    "nn.functional.scaled_dot_product_attention": lambda sample: sample.kwargs.get("dropout_p", 0) > 0,
}

# Which numbers the axis "numbers" may give an operator, and why no others.
NUMBERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cdist": (lambda v: abs(v) < 10, "of powers of 1e10 the CPU makes a gradient of NaN, the device one of 0"),
    "linalg.vector_norm": (
        lambda v: not 10 < abs(v) < torch.inf,
        "200th powers overflow; the CPU takes one element as it is",
    ),
    "nn.functional.scaled_dot_product_attention": (
        lambda v: 0 <= v < 1,
        "the CPU does not look at the rate of dropout where it takes a kernel without",
    ),
    "nn.functional.softshrink": (lambda v: v >= 0, "the CPU refuses others, and the number is data to the device"),
}

# Checks that the CPU fails, and configurations of optimizers.
SKIPPED: dict[tuple[str, str], str] = {
    ("ASGD", "capturable differentiable"): "a step overwrites what the gradient of the one before it needs",
    ("fft.ihfft2", "out"): "the CPU leaves out= unwritten where one dimension is transformed",
    ("RAdam", "capturable differentiable"): "in the first steps the gradient of a branch not taken is NaN",
    ("fft.ihfftn", "out"): "the CPU leaves out= unwritten",
    ("linalg.lu", "out"): "the CPU crashes when out= has another dtype",
    ("lu_unpack", "out"): "the CPU crashes when out= has another dtype",
    ("tril", "out"): "the CPU corrupts its memory when out= has other strides and there is a batch",
    ("triu", "out"): "the CPU corrupts its memory when out= has other strides and there is a batch",
    ("grid_sampler_2d", "numbers"): "the CPU takes modes that do not exist",
    ("grid_sampler_3d", "numbers"): "the CPU takes modes that do not exist",
    ("roll", "numbers"): "the CPU does not look at the dimension where there are no elements",
    ("_upsample_bilinear2d_aa", "numbers"): "the CPU repeats the first row where it makes one column",
    ("nn.functional.fractional_max_pool2d", "numbers"): "the CPU takes windows of negative size",
    ("nn.functional.fractional_max_pool3d", "numbers"): "the CPU takes windows of negative size",
    ("nn.CTCLoss", "strided"): "the CPU reads strided targets of one dimension as if they were contiguous",
    ("native_group_norm", "strided"): "the CPU refuses strided inputs",
}

# Many CPU kernels round every intermediate result to half precision; the device computes in float32 and rounds once. So
# a result that differs from the CPU's also passes if it is, at default tolerances, the CPU's float32 result on the same
# inputs, rounded once (`precision.rounds_elsewhere`).

# Results of half precision that need only be as near to the float32 ones as the CPU's own are (gradients of half
# precision always: they come from several operators, each of which rounds).
AS_ACCURATE: dict[str, str] = {
    "nn.functional.bilinear": "the bias is added to the rounded sum of products",
    "matrix_exp": "a polynomial and squarings, each a matrix product that amplifies the errors before it",
    "nn.functional.linear_cross_entropy": "a matrix product, log_softmax and a loss, each of which rounds",
    "nn.functional.scaled_dot_product_attention": "the weights are rounded before they meet the values",
}


# Which of several equal elements comes first is not specified (the CPU's own order depends on the size); float32
# samples have none, these dtypes do. What is compared then, of the results of an operator called with a sample.
Compared = Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]


def _values(sample: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
    return results[:1]


def _sorted_elements(sample: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The elements at the positions that are the result."""
    return [_elements(sample, results[0], 0)]


def _values_and_elements(dim_at: int) -> Compared:
    """Of operators that return values and their positions: the values, and what stands at the positions."""
    return lambda sample, results: [results[0], _elements(sample, results[1], dim_at)]


def _elements(sample: Any, positions: torch.Tensor, dim_at: int) -> torch.Tensor:
    """Args: dim_at: the dimension's place among the sample's arguments, if they have it."""
    source, positions = sample.input.detach(), positions.cpu()
    if not source.dim():
        return source.expand(positions.shape)
    dim = sample.kwargs.get("dim", sample.args[dim_at] if len(sample.args) > dim_at else -1)
    return torch.take_along_dim(source, positions if positions.dim() == source.dim() else positions.unsqueeze(dim), dim)


TIES: dict[str, Compared] = {
    "argsort": _sorted_elements,
    "kthvalue": _values_and_elements(1),
    "mode": _values_and_elements(0),
    "msort": _values,
    "sort": _values_and_elements(0),
    "topk": _values_and_elements(1),
}
TIED_DTYPES = ("bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
