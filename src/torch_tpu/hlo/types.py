"""torch dtype ↔ StableHLO element type ↔ numpy dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import torch

from torch_tpu import delayed

if TYPE_CHECKING:
    from jaxlib.mlir import ir
else:
    ir = delayed.module("jaxlib.mlir.ir", globals(), "ir")

NUMPY: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: np.dtype(ml_dtypes.float8_e8m0fnu),
}

_ELEMENT_TYPE: dict[torch.dtype, Callable[[], ir.Type]] = {
    torch.bool: lambda: ir.IntegerType.get_signless(1),
    torch.uint8: lambda: ir.IntegerType.get_unsigned(8),
    torch.uint16: lambda: ir.IntegerType.get_unsigned(16),
    torch.uint32: lambda: ir.IntegerType.get_unsigned(32),
    torch.uint64: lambda: ir.IntegerType.get_unsigned(64),
    torch.int8: lambda: ir.IntegerType.get_signless(8),
    torch.int16: lambda: ir.IntegerType.get_signless(16),
    torch.int32: lambda: ir.IntegerType.get_signless(32),
    torch.int64: lambda: ir.IntegerType.get_signless(64),
    torch.float16: lambda: ir.F16Type.get(),
    torch.bfloat16: lambda: ir.BF16Type.get(),
    torch.float32: lambda: ir.F32Type.get(),
    torch.float64: lambda: ir.F64Type.get(),
    torch.complex64: lambda: ir.ComplexType.get(ir.F32Type.get()),
    torch.complex128: lambda: ir.ComplexType.get(ir.F64Type.get()),
    torch.float8_e4m3fn: lambda: ir.Float8E4M3FNType.get(),
    torch.float8_e4m3fnuz: lambda: ir.Float8E4M3FNUZType.get(),
    torch.float8_e5m2: lambda: ir.Float8E5M2Type.get(),
    torch.float8_e5m2fnuz: lambda: ir.Float8E5M2FNUZType.get(),
    torch.float8_e8m0fnu: lambda: ir.Float8E8M0FNUType.get(),
}

REAL_PART: dict[torch.dtype, torch.dtype] = {torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF: dict[torch.dtype, torch.dtype] = {real: cplx for cplx, real in REAL_PART.items()}
# PyTorch computes reduced-precision floats in float32 and rounds once at the end.
COMPUTE: dict[torch.dtype, torch.dtype] = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def element_type(dtype: torch.dtype) -> ir.Type:
    """The StableHLO element type; raises TypeError for a dtype the device has no element type for."""
    try:
        return _ELEMENT_TYPE[dtype]()
    except KeyError:
        raise TypeError(f"the tpu device has no element type for {dtype}") from None


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype; raises TypeError for a dtype the device has no element type for."""
    try:
        return NUMPY[dtype]
    except KeyError:
        raise TypeError(f"the tpu device does not support {dtype}") from None


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of complex numbers of two such parts; raises TypeError for float16, of which XLA has none."""
    if dtype not in COMPLEX_OF:
        raise TypeError("the tpu device does not support torch.complex32. Use torch.complex64.")
    return COMPLEX_OF[dtype]


def tensor_type(shape: tuple[int, ...], dtype: torch.dtype) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, element_type(dtype))


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def is_integer(dtype: torch.dtype) -> bool:
    """Integer dtypes without bool."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


_TYPE_NAMES = {
    torch.uint8: "Byte",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bool: "Bool",
    torch.bfloat16: "BFloat16",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def type_name(dtype: torch.dtype) -> str:
    """What PyTorch's messages call a dtype."""
    return _TYPE_NAMES.get(dtype, str(dtype))
