"""Every exception from "the device gives what the CPU gives, at torch.testing's default tolerances", with a reason."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """Wider tolerances of an operator, for the dtypes named (none: all)."""

    rtol: float
    atol: float
    reason: str
    dtypes: tuple[str, ...] = ()


# float32 results far from 1 whose terms cancel: the CPU's own distance from the double-precision result is as large.
_CANCELS = "sums of large terms that cancel; the CPU is as far from the double-precision result"
TOLERANCES: dict[str, Tolerance] = {
    "addbmm": Tolerance(1.3e-6, 5e-5, _CANCELS, ("float32",)),
    "matrix_exp": Tolerance(1e-5, 1e-1, _CANCELS + ", of size 1e5", ("float32",)),
    "nn.functional.conv3d": Tolerance(1.3e-6, 1e-4, _CANCELS, ("float32",)),
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
NOT_POSSIBLE: dict[str, str] = {
    "chalf": "XLA has no complex number of two float16",
    "sparse.mm": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "to_sparse": _SPARSE,
}

# Operators that PyTorch gives everything but the first argument on the CPU, whatever the device.
HOST_ARGUMENTS: dict[str, str] = {
    "tensor_split": "it refuses sections or indices on a device, because it reads them to make the views",
}
