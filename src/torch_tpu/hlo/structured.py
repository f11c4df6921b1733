"""StableHLO operations with structure: contractions, reductions, windows, gather and scatter, sort, loops, calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, types
from torch_tpu.hlo.array import Array, Number

Combine = Callable[..., Any]


def _ir_types(arrays: Sequence[Array]) -> list[ir.Type]:
    return [a.value.type for a in arrays]


def fill_region(region: ir.Region, arguments: Sequence[tuple[tuple[int, ...], torch.dtype]], body: Combine) -> None:
    """Builds `body` (Arrays in, one Array or a sequence of them out) as the only block of `region`."""
    block = region.blocks.append(*(types.tensor_type(shape, dtype) for shape, dtype in arguments))
    with ir.InsertionPoint(block):
        parameters = [Array(v, shape, dtype) for v, (shape, dtype) in zip(block.arguments, arguments, strict=True)]
        results = body(*parameters)
        results = [results] if isinstance(results, Array) else list(results)
        stablehlo.return_([r.value for r in results])


def _precision(precision: str) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([stablehlo.PrecisionAttr.get(precision)] * 2)


# --- contraction -------------------------------------------------------------------------------------------------


def dot_general(
    x: Array,
    y: Array,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    *,
    dtype: torch.dtype | None = None,
    precision: str = "HIGHEST",
) -> Array:
    """Batched tensor contraction. Result dimensions: batch, then what is left of `x`, then of `y`.

    Args:
        dtype: the result's (and so the accumulator's) dtype; by default that of the operands.
        precision: DEFAULT (one bf16 pass on TPU), HIGH (three) or HIGHEST (six).
    """
    dtype = dtype or x.dtype
    numbers = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(batch[0]),
        rhs_batching_dimensions=list(batch[1]),
        lhs_contracting_dimensions=list(contract[0]),
        rhs_contracting_dimensions=list(contract[1]),
    )
    shape = (
        *(x.shape[d] for d in batch[0]),
        *(s for d, s in enumerate(x.shape) if d not in (*batch[0], *contract[0])),
        *(s for d, s in enumerate(y.shape) if d not in (*batch[1], *contract[1])),
    )
    value = stablehlo.dot_general(
        types.tensor_type(shape, dtype), x.value, y.value, numbers, precision_config=_precision(precision)
    )
    return Array(value, shape, dtype)


def convolution(
    x: Array,
    kernel: Array,
    *,
    layout: tuple[Sequence[int], Sequence[int], Sequence[int]],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    x_dilation: Sequence[int] | None = None,
    kernel_dilation: Sequence[int] | None = None,
    groups: int = 1,
    batch_groups: int = 1,
    reverse_kernel: bool = False,
    dtype: torch.dtype | None = None,
    precision: str = "HIGHEST",
) -> Array:
    """General convolution.

    Args:
        layout: for input, kernel and output, the positions of (batch, feature, *spatial),
            (output feature, input feature, *spatial) and (batch, feature, *spatial).
        padding: (low, high) for each spatial dimension; may be negative.
    """
    dtype = dtype or x.dtype
    spatial = len(strides)
    x_dilation = list(x_dilation or [1] * spatial)
    kernel_dilation = list(kernel_dilation or [1] * spatial)
    x_spec, kernel_spec, out_spec = (list(spec) for spec in layout)
    numbers = stablehlo.ConvDimensionNumbers.get(
        input_batch_dimension=x_spec[0],
        input_feature_dimension=x_spec[1],
        input_spatial_dimensions=x_spec[2:],
        kernel_output_feature_dimension=kernel_spec[0],
        kernel_input_feature_dimension=kernel_spec[1],
        kernel_spatial_dimensions=kernel_spec[2:],
        output_batch_dimension=out_spec[0],
        output_feature_dimension=out_spec[1],
        output_spatial_dimensions=out_spec[2:],
    )
    shape = [0] * (spatial + 2)
    shape[out_spec[0]] = x.shape[x_spec[0]] // batch_groups
    shape[out_spec[1]] = kernel.shape[kernel_spec[0]]
    for i in range(spatial):
        size = (x.shape[x_spec[2 + i]] - 1) * x_dilation[i] + 1 if x.shape[x_spec[2 + i]] else 0
        window = (kernel.shape[kernel_spec[2 + i]] - 1) * kernel_dilation[i] + 1
        room = size + sum(padding[i]) - window
        shape[out_spec[2 + i]] = room // strides[i] + 1 if room >= 0 else 0
    flat_padding = ir.DenseElementsAttr.get(
        _int64([edge for pair in padding for edge in pair]).reshape(spatial, 2) if spatial else _int64([]).reshape(0, 2)
    )
    value = stablehlo.convolution(
        types.tensor_type(tuple(shape), dtype),
        x.value,
        kernel.value,
        numbers,
        groups,
        batch_groups,
        window_strides=list(strides),
        padding=flat_padding,
        lhs_dilation=x_dilation,
        rhs_dilation=kernel_dilation,
        window_reversal=[reverse_kernel] * spatial,
        precision_config=_precision(precision),
    )
    return Array(value, shape, dtype)


def _int64(values: Sequence[int]) -> Any:
    return np.asarray(values, dtype=np.int64)


# --- reduction ---------------------------------------------------------------------------------------------------


def reduce(
    arrays: Sequence[Array], initial: Sequence[Array], dimensions: Sequence[int], combine: Combine
) -> list[Array]:
    """Reduces several equally shaped arrays together; `combine` gets the two halves' scalars: (*left, *right)."""
    if not dimensions:
        return list(arrays)
    shape = tuple(s for d, s in enumerate(arrays[0].shape) if d not in dimensions)
    operation = stablehlo.ReduceOp(
        [types.tensor_type(shape, a.dtype) for a in arrays],
        [a.value for a in arrays],
        [i.value for i in initial],
        sorted(dimensions),
    )
    fill_region(operation.regions[0], [((), a.dtype) for a in (*arrays, *arrays)], combine)
    return [Array(value, shape, a.dtype) for value, a in zip(operation.results, arrays, strict=True)]


def reduce_one(x: Array, initial: Number, dimensions: Sequence[int], combine: Combine) -> Array:
    return reduce([x], [hlo.constant(initial, x.dtype)], dimensions, combine)[0]


def reduce_sum(x: Array, dimensions: Sequence[int]) -> Array:
    if x.dtype is torch.bool:
        raise TypeError("convert bool before summing")
    return reduce_one(x, 0, dimensions, hlo.add)


def reduce_product(x: Array, dimensions: Sequence[int]) -> Array:
    return reduce_one(x, 1, dimensions, hlo.multiply)


def reduce_max(x: Array, dimensions: Sequence[int]) -> Array:
    """NaN wins."""
    return reduce_one(x, hlo.lowest(x.dtype), dimensions, hlo.maximum)


def reduce_min(x: Array, dimensions: Sequence[int]) -> Array:
    """NaN wins."""
    return reduce_one(x, hlo.highest(x.dtype), dimensions, hlo.minimum)


def reduce_and(x: Array, dimensions: Sequence[int]) -> Array:
    return reduce_one(x, True, dimensions, hlo.and_)


def reduce_or(x: Array, dimensions: Sequence[int]) -> Array:
    return reduce_one(x, False, dimensions, hlo.or_)


def reduce_window(
    arrays: Sequence[Array],
    initial: Sequence[Array],
    combine: Combine,
    *,
    window: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Sequence[tuple[int, int]] | None = None,
    dilation: Sequence[int] | None = None,
    base_dilation: Sequence[int] | None = None,
) -> list[Array]:
    """Reduces each window; all lists have one entry per dimension of the arrays."""
    ndim = arrays[0].ndim
    strides = list(strides or [1] * ndim)
    padding = list(padding or [(0, 0)] * ndim)
    dilation = list(dilation or [1] * ndim)
    base_dilation = list(base_dilation or [1] * ndim)
    shape = []
    for d, size in enumerate(arrays[0].shape):
        room = (size - 1) * base_dilation[d] + 1 if size else 0
        room += sum(padding[d]) - ((window[d] - 1) * dilation[d] + 1)
        shape.append(room // strides[d] + 1 if room >= 0 else 0)
    operation = stablehlo.ReduceWindowOp(
        [types.tensor_type(tuple(shape), a.dtype) for a in arrays],
        [a.value for a in arrays],
        [i.value for i in initial],
        list(window),
        window_strides=strides,
        base_dilations=base_dilation,
        window_dilations=dilation,
        padding=ir.DenseElementsAttr.get(_int64([e for pair in padding for e in pair]).reshape(ndim, 2)),
    )
    fill_region(operation.regions[0], [((), a.dtype) for a in (*arrays, *arrays)], combine)
    return [Array(value, shape, a.dtype) for value, a in zip(operation.results, arrays, strict=True)]


# --- indexing ----------------------------------------------------------------------------------------------------


def gather(
    x: Array,
    indices: Array,
    *,
    offset_dims: Sequence[int],
    collapsed_slice_dims: Sequence[int],
    start_index_map: Sequence[int],
    slice_sizes: Sequence[int],
    index_vector_dim: int | None = None,
    operand_batching_dims: Sequence[int] = (),
    start_indices_batching_dims: Sequence[int] = (),
    sorted_indices: bool = False,
) -> Array:
    """StableHLO gather; out-of-range starts are clamped."""
    index_vector_dim = indices.ndim - 1 if index_vector_dim is None else index_vector_dim
    numbers = stablehlo.GatherDimensionNumbers.get(
        offset_dims=list(offset_dims),
        collapsed_slice_dims=list(collapsed_slice_dims),
        operand_batching_dims=list(operand_batching_dims),
        start_indices_batching_dims=list(start_indices_batching_dims),
        start_index_map=list(start_index_map),
        index_vector_dim=index_vector_dim,
    )
    value = stablehlo.gather(x.value, indices.value, numbers, list(slice_sizes), indices_are_sorted=sorted_indices)
    return Array(value, value.type.shape, x.dtype)


def scatter(
    arrays: Sequence[Array],
    indices: Array,
    updates: Sequence[Array],
    combine: Combine,
    *,
    update_window_dims: Sequence[int],
    inserted_window_dims: Sequence[int],
    scatter_dims_to_operand_dims: Sequence[int],
    index_vector_dim: int | None = None,
    input_batching_dims: Sequence[int] = (),
    scatter_indices_batching_dims: Sequence[int] = (),
    unique_indices: bool = False,
    sorted_indices: bool = False,
) -> list[Array]:
    """StableHLO scatter; `combine` gets (*old, *update) scalars. Out-of-range updates are dropped."""
    numbers = stablehlo.ScatterDimensionNumbers.get(
        update_window_dims=list(update_window_dims),
        inserted_window_dims=list(inserted_window_dims),
        input_batching_dims=list(input_batching_dims),
        scatter_indices_batching_dims=list(scatter_indices_batching_dims),
        scattered_dims_to_operand_dims=list(scatter_dims_to_operand_dims),
        index_vector_dim=indices.ndim - 1 if index_vector_dim is None else index_vector_dim,
    )
    operation = stablehlo.ScatterOp(
        _ir_types(arrays),
        [a.value for a in arrays],
        indices.value,
        [u.value for u in updates],
        numbers,
        indices_are_sorted=sorted_indices,
        unique_indices=unique_indices,
    )
    fill_region(operation.regions[0], [((), a.dtype) for a in (*arrays, *arrays)], combine)
    return [Array(value, a.shape, a.dtype) for value, a in zip(operation.results, arrays, strict=True)]


def accumulate(total: Array, addend: Array) -> Array:
    """total + addend; where the addend is a scatter into zeros, that one goes into `total` instead."""
    operation = addend.value.owner
    if not isinstance(operation, ir.Block) and operation.name == "stablehlo.scatter":
        into = operation.operands[0]
        if into.type == total.value.type and hlo.known_number(Array(into, total.shape, total.dtype)) == 0:
            operation.operands[0] = total.value
            return addend
    return total + addend


# --- sorting and loops -------------------------------------------------------------------------------------------


def sort(arrays: Sequence[Array], dim: int, comes_before: Combine, *, stable: bool = True) -> list[Array]:
    """Sorts several arrays together along `dim`; `comes_before` gets (a_left, a_right, b_left, b_right, …)."""
    operation = stablehlo.SortOp(
        _ir_types(arrays), [a.value for a in arrays], dimension=dim % arrays[0].ndim, is_stable=stable
    )
    fill_region(operation.regions[0], [((), a.dtype) for a in arrays for _ in range(2)], comes_before)
    return [Array(value, a.shape, a.dtype) for value, a in zip(operation.results, arrays, strict=True)]


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest of the last dimension in descending order, and their int32 positions."""
    operation = chlo.TopKOp(x.value, k)
    shape = (*x.shape[:-1], k)
    return Array(operation.results[0], shape, x.dtype), Array(operation.results[1], shape, torch.int32)


def while_loop(initial: Sequence[Array], condition: Combine, body: Combine) -> list[Array]:
    """Runs `body` on the carried arrays while `condition` of them (a 0-d bool Array) holds."""
    operation = stablehlo.WhileOp(_ir_types(initial), [a.value for a in initial])
    carried = [(a.shape, a.dtype) for a in initial]
    fill_region(operation.regions[0], carried, condition)
    fill_region(operation.regions[1], carried, body)
    return [Array(value, a.shape, a.dtype) for value, a in zip(operation.results, initial, strict=True)]


def fori_loop(count: int, body: Combine, initial: Sequence[Array]) -> list[Array]:
    """`body(i, *carried)` for i = 0 … count-1; i is a 0-d int32 Array."""
    results = while_loop(
        [hlo.constant(0, torch.int32), *initial],
        lambda i, *carried: i < count,
        lambda i, *carried: [i + 1, *_as_list(body(i, *carried))],
    )
    return results[1:]


def conditional(
    condition: Array,
    when_true: Callable[[], Array | Sequence[Array]],
    otherwise: Callable[[], Array | Sequence[Array]],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
) -> list[Array]:
    """What one of two functions makes, which both make Arrays of these shapes and dtypes; only that one runs."""
    operation = stablehlo.IfOp([types.tensor_type(tuple(s), d) for s, d in results], condition.value)
    for region, branch in zip(operation.regions, (when_true, otherwise), strict=True):
        fill_region(region, [], branch)
    return [Array(value, s, d) for value, (s, d) in zip(operation.results, results, strict=True)]


def _as_list(results: Array | Sequence[Array]) -> list[Array]:
    return [results] if isinstance(results, Array) else list(results)


def optimization_barrier(x: Array, *others: Array) -> Array:
    """`x`, computed once and kept in memory, and not used before the others are known.

    Nothing is fused, moved or repeated across this.
    """
    operation = stablehlo.OptimizationBarrierOp([a.value for a in (x, *others)])
    return Array(operation.results[0], x.shape, x.dtype)


# --- Fourier, linear algebra, calls ------------------------------------------------------------------------------


def fft(x: Array, kind: str, lengths: Sequence[int]) -> Array:
    """`kind` is FFT, IFFT (normalised by 1/n), RFFT or IRFFT, over the last len(lengths) dimensions."""
    value = stablehlo.fft(x.value, stablehlo.FftTypeAttr.get(kind), list(lengths))
    dtype = {"RFFT": types.COMPLEX_OF, "IRFFT": types.REAL_PART}.get(kind, {}).get(x.dtype, x.dtype)
    return Array(value, value.type.shape, dtype)


def cholesky(x: Array, *, lower: bool = True) -> Array:
    return Array(stablehlo.cholesky(x.value, lower=lower), x.shape, x.dtype)


def triangular_solve(
    a: Array, b: Array, *, left: bool, lower: bool, unit_diagonal: bool, transpose: str = "NO_TRANSPOSE"
) -> Array:
    """Solves op(a) x = b (or x op(a) = b when not `left`); `transpose` is NO_TRANSPOSE, TRANSPOSE or ADJOINT."""
    attribute = stablehlo.TransposeAttr.get(transpose)
    return Array(stablehlo.triangular_solve(a.value, b.value, left, lower, unit_diagonal, attribute), b.shape, b.dtype)


def custom_call(
    target: str,
    operands: Sequence[Array],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
    attributes: Mapping[str, bool | str] | None = None,
    *,
    operand_layouts: Sequence[Sequence[int]] | None = None,
    result_layouts: Sequence[Sequence[int]] | None = None,
) -> list[Array]:
    """A call of a typed-FFI function registered with XLA; layouts are minor-to-major dimension lists.

    Args:
        attributes: flags, and single letters, which the function gets as unsigned bytes.
    """

    def attribute(value: bool | str) -> ir.Attribute:
        if isinstance(value, bool):
            return ir.BoolAttr.get(value)
        return ir.IntegerAttr.get(ir.IntegerType.get_unsigned(8), ord(value))

    def layouts(lists: Sequence[Sequence[int]] | None) -> ir.ArrayAttr | None:
        if lists is None:
            return None
        index = ir.IndexType.get()
        return ir.ArrayAttr.get(
            [ir.DenseIntElementsAttr.get(_int64(order), type=index, shape=[len(order)]) for order in lists]
        )

    module.target().custom_calls.add(target)
    operation = stablehlo.CustomCallOp(
        [types.tensor_type(tuple(shape), dtype) for shape, dtype in results],
        [a.value for a in operands],
        target,
        has_side_effect=False,
        backend_config=ir.DictAttr.get({name: attribute(value) for name, value in (attributes or {}).items()}),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        operand_layouts=layouts(operand_layouts),
        result_layouts=layouts(result_layouts),
    )
    return [Array(value, shape, dtype) for value, (shape, dtype) in zip(operation.results, results, strict=True)]


def compiler_call(
    target: str,
    operands: Sequence[Array],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
    config: str = "",
    *,
    api_version: int = 1,
) -> list[Array]:
    """A call of an algorithm that XLA's compiler puts in its place: no function of this name exists.

    Args:
        config: its options, as the algorithm wants them written.
        api_version: of StableHLO's custom calls; 1 and 2 are the original ones.
    """
    operation = stablehlo.CustomCallOp(
        [types.tensor_type(tuple(shape), dtype) for shape, dtype in results],
        [a.value for a in operands],
        target,
        has_side_effect=False,
        backend_config=ir.StringAttr.get(config),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), api_version),
    )
    return [Array(value, tuple(shape), dtype) for value, (shape, dtype) in zip(operation.results, results, strict=True)]
