"""A small call of each overload that PyTorch or a decomposition makes of other operators, to see which ones it reaches.

Most calls follow from the schema: every required argument gets a plain value, and the shapes and dtypes of the tensors
are the first that the CPU accepts. Operators that want more than that have a line in `CALLS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from torch_tpu.ops.core.schema import Argument, signature


class Example(NamedTuple):
    """Arguments of a call, with tensors on the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Positive numbers; a square matrix is positive definite."""
    values = torch.full(shape, 0.125, dtype=dtype)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        values += torch.eye(shape[-1], dtype=dtype) / 2
    return values


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values)


class _Tensors(NamedTuple):
    """The shape and dtype of the first tensor argument, and of those after it (None: the same)."""

    first: tuple[tuple[int, ...], torch.dtype]
    rest: tuple[tuple[int, ...], torch.dtype] | None = None


_F32, _I64, _BOOL, _C64 = torch.float32, torch.int64, torch.bool, torch.complex64
_TRIED = (
    _Tensors(((4, 4), _F32)),
    _Tensors(((4, 4), _I64)),
    _Tensors(((4, 4), _BOOL)),
    _Tensors(((4, 4), _C64)),
    _Tensors(((2, 4, 4), _F32)),
    _Tensors(((2, 4, 4, 4), _F32)),
    _Tensors(((2, 4, 4, 4, 4), _F32)),
    _Tensors(((4, 4), _F32), ((4,), _F32)),
    _Tensors(((4, 4), _F32), ((4,), _I64)),
    _Tensors(((4, 4), _F32), ((), _F32)),
    _Tensors(((4, 4), _F32), ((), _I64)),
    _Tensors(((4,), _F32)),
    _Tensors(((4,), _I64)),
    _Tensors(((4,), _F32), ((4,), _I64)),
    _Tensors(((4,), _F32), ((), _F32)),
    _Tensors(((4,), _F32), ((4, 4), _I64)),
    _Tensors(((), _F32)),
    _Tensors(((), _I64)),
    _Tensors(((), _BOOL)),
    _Tensors(((), _F32), ((4,), _F32)),
)


_SHAPES = frozenset({"size", "sizes", "shape", "output_size", "input_size", "input_sizes", "self_size"})


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return floats(*shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    return (torch.arange(int(torch.Size(shape).numel())) % 2).reshape(shape)


def _number(a: Argument, shape: tuple[int, ...]) -> Any:
    """A plain value for an argument that is no tensor."""
    kind = a.kind.removeprefix("Optional[").removesuffix("]")
    if a.name == "dtype" or kind == "ScalarType":
        return torch.float32
    if kind == "List[int":
        if "dim" in a.name:
            return [0]
        return list(shape) if a.name in _SHAPES else [1, 1]
    values = {
        "number": 1,
        "float": 0.5,
        "bool": False,
        "int": 0 if a.name in ("dim", "dim0") else 1,
        "str": "mean",
        "Device": torch.device("cpu"),
        "List[bool": [True] * 3,
        "List[float": [0.5] * 2,
        "List[number": [1, 1],
    }
    return values.get(kind)


def _by_schema(func: OpOverload, tensors: _Tensors) -> Example:
    required = {a.name for a in func._schema.arguments if not a.has_default_value()}
    kwargs: dict[str, Any] = {}
    met = 0
    for a in signature(func).arguments:
        if a.name not in required or a.is_out:
            continue
        if a.is_tensor or a.is_tensor_list:
            spec = tensors.first if met == 0 or tensors.rest is None else tensors.rest
            kwargs[a.name] = _tensor(*spec) if a.is_tensor else [_tensor(*spec), _tensor(*spec)]
            met += 1
        else:
            kwargs[a.name] = _number(a, tensors.first[0])
    return Example((), kwargs)


def examples(func: OpOverload) -> Iterator[Example]:
    """Calls to try in this order."""
    name = func.name().removeprefix("aten::")
    if name in CALLS:
        yield CALLS[name]()
        return
    takes_tensors = any(a.is_tensor or a.is_tensor_list for a in signature(func).arguments if not a.is_out)
    for tensors in _TRIED if takes_tensors else _TRIED[:1]:
        yield _by_schema(func, tensors)


def call(*args: Any, **kwargs: Any) -> Callable[[], Example]:
    """An entry of `CALLS`; a function among the arguments is called for each use."""

    def make(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return [make(v) for v in value] if isinstance(value, list) else value

    return lambda: Example(tuple(make(v) for v in args), {k: make(v) for k, v in kwargs.items()})


_1D = (floats(1, 2, 4), floats(2, 2, 3), floats(2))
_2D = (floats(1, 2, 4, 4), floats(2, 2, 3, 3), floats(2))
_3D = (floats(1, 2, 4, 4, 4), floats(2, 2, 3, 3, 3), floats(2))
_GATES = [floats(12, 4), floats(12, 4), floats(12), floats(12)]
_RNN = [floats(4, 4), floats(4, 4), floats(4), floats(4)]
_LSTM = [floats(16, 4), floats(16, 4), floats(16), floats(16)]
_PACKED = (floats(4, 4), longs(2, 2))
_FLAGS = (True, 1, 0.0, False, False)
_LISTS: tuple[list[torch.Tensor], ...] = ([floats(4)], [floats(4)], [floats(4)], [floats(4)], [], [floats()])
_ADAM = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
_ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
_SGD = {
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": False,
}
_ENCODER = [floats(12, 4), floats(12), floats(4, 4), floats(4)]
_FLOAT8 = floats(16, 16).to(torch.float8_e4m3fn)
_CSR = (longs(0, 1, 2), longs(0, 1))
_FLAT = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

CALLS: dict[str, Callable[[], Example]] = {
    "__ilshift__.Scalar": call(zeros(4), 1),
    "_amp_update_scale": call(floats(), zeros(1, dtype=torch.int32), floats(), 2.0, 0.5, 10),
    "_backward": call(floats().requires_grad_(), []),
    "_batch_norm_impl_index_backward": call(
        0, *[floats(2, 4)] * 2, *[floats(4)] * 5, True, 1e-5, [True, True, True], zeros(0, dtype=torch.uint8)
    ),
    "_convert_indices_from_csr_to_coo": call(*_CSR),
    "_convolution": call(*_2D, *_FLAT, False, False, False, False),
    "_convolution.deprecated": call(*_2D, *_FLAT, False, False, False),
    "_convolution_double_backward": call(
        floats(1, 2, 4, 4), None, None, floats(1, 2, 2, 2), *_2D[1::-1], *_FLAT, [True] * 3
    ),
    "_convolution_mode": call(*_2D, [1, 1], "same", [1, 1], 1),
    "_dyn_quant_matmul_4bit": call(floats(4), floats(4), 2, 2, 2),
    "_fake_quantize_learnable_per_tensor_affine": call(floats(4), floats(1), zeros(1).float(), 0, 255),
    "_foreach_addcdiv.Tensor": call([floats(4)], [floats(4)], [floats(4)], floats(1)),
    "_foreach_addcdiv_.Tensor": call([floats(4)], [floats(4)], [floats(4)], floats(1)),
    "_foreach_addcmul.Tensor": call([floats(4)], [floats(4)], [floats(4)], floats(1)),
    "_foreach_addcmul_.Tensor": call([floats(4)], [floats(4)], [floats(4)], floats(1)),
    "_functional_sym_constrain_range_for_size": call(4, 3, 5, floats()),
    "_fused_adagrad": call(*[[floats(4)]] * 3, [floats()], lr=0.1, **_ADAGRAD),
    "_fused_adagrad.tensor_lr": call(*[[floats(4)]] * 3, [floats()], lr=floats(), **_ADAGRAD),
    "_fused_adam": call(*_LISTS, lr=0.1, **_ADAM),
    "_fused_adam.tensor_lr": call(*_LISTS, lr=floats(), **_ADAM),
    "_fused_adamw": call(*_LISTS, lr=0.1, **_ADAM),
    "_fused_adamw.tensor_lr": call(*_LISTS, lr=floats(), **_ADAM),
    "_fused_sgd": call(*[[floats(4)]] * 3, lr=0.1, **_SGD),
    "_fused_sgd.tensor_lr": call(*[[floats(4)]] * 3, lr=floats(), **_SGD),
    "_grid_sampler_2d_cpu_fallback_backward": call(
        floats(1, 2, 4, 4), floats(1, 2, 4, 4), floats(1, 4, 4, 2), 0, 0, False
    ),
    "_histogramdd_bin_edges": call(floats(4, 2), [2, 2]),
    "_histogramdd_from_bin_cts": call(floats(4, 2), [2, 2]),
    "_histogramdd_from_bin_tensors": call(floats(4, 2), [longs(0, 1, 2).float(), longs(0, 1, 2).float()]),
    "_jagged_to_padded_dense_forward": call(floats(4, 2), [longs(0, 1, 4)], [3]),
    "_linalg_check_errors": call(zeros(dtype=torch.int32), "name", is_matrix=True),
    "_native_multi_head_attention": call(*[floats(1, 4, 4)] * 3, 4, 2, *_ENCODER),
    "_nested_view_from_buffer": call(floats(4), longs(2, 2).reshape(2, 1), longs(1, 1).reshape(2, 1), longs(0, 2)),
    "_nnpack_spatial_convolution": call(*_2D, [0, 0]),
    "_pack_padded_sequence": call(floats(4, 2, 3), longs(4, 2), False),
    "_pack_padded_sequence_backward": call(floats(6, 3), [4, 2, 3], longs(2, 2, 1, 1), False),
    "_pad_packed_sequence": call(floats(6, 3), longs(2, 2, 1, 1), False, 0, 4),
    "_padded_dense_to_jagged_forward": call(floats(2, 3, 4), [longs(0, 1, 4)], 4),
    "_scaled_mm_v2": call(_FLOAT8, _FLOAT8.t(), [floats(1)], [0], [0], [floats(1)], [0], [0], None, torch.float32),
    "_segment_reduce_backward": call(*[floats(1)] * 2, floats(4), "max", lengths=longs(4)),
    "_print": call(""),
    "_slow_conv2d_backward.output_mask": call(floats(1, 2, 2, 2), *_2D[:2], [3, 3], [1, 1], [0, 0], [True, True, True]),
    "_slow_conv2d_forward": call(*_2D[:2], [3, 3], _2D[2], [1, 1], [0, 0]),
    "_thnn_differentiable_gru_cell_backward": call(
        floats(2, 4), floats(2, 12), floats(2, 12), floats(2, 4), None, None
    ),
    "_thnn_fused_gru_cell": call(floats(2, 12), floats(2, 12), floats(2, 4)),
    "_thnn_fused_lstm_cell": call(floats(2, 16), floats(2, 16), floats(2, 4)),
    "_thnn_fused_lstm_cell_backward": call(*[floats(2, 4)] * 4, floats(2, 16), True),
    "_transform_bias_rescale_qkv": call(floats(2, 4, 12), floats(12), 2),
    "_transformer_encoder_layer_fwd": call(
        floats(1, 4, 4), 4, 2, *_ENCODER, True, True, 1e-5, *[floats(4)] * 4, *[floats(4, 4), floats(4)] * 2
    ),
    "_trilinear": call(*[floats(4, 4)] * 3, [], [], [], [0]),
    "_upsample_bicubic2d_aa.vec": call(floats(1, 2, 4, 4), [2, 2], False, None),
    "_upsample_bilinear2d_aa.vec": call(floats(1, 2, 4, 4), [2, 2], False, None),
    "_upsample_lanczos2d_aa.vec": call(floats(1, 2, 4, 4), [2, 2], False, None),
    "_upsample_nearest_exact1d.vec": call(floats(1, 2, 4), [2], None),
    "_upsample_nearest_exact2d.vec": call(floats(1, 2, 4, 4), [2, 2], None),
    "_upsample_nearest_exact3d.vec": call(floats(1, 2, 4, 4, 4), [2, 2, 2], None),
    "adaptive_avg_pool1d": call(floats(2, 4, 4), [2]),
    "adaptive_avg_pool2d": call(floats(2, 4, 4), [2, 2]),
    "adaptive_avg_pool3d": call(floats(2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool1d": call(floats(2, 4, 4), [2]),
    "addr.out": call(floats(4, 4), floats(4), floats(4), out=floats(0)),
    "affine_grid_generator": call(floats(1, 2, 3), [1, 1, 2, 2], False),
    "affine_grid_generator_backward": call(floats(1, 2, 2, 2), [1, 1, 2, 2], False),
    "as_strided_scatter": call(floats(4, 4), floats(2), [2], [4]),
    "avg_pool1d": call(floats(2, 4, 4), [2]),
    "batch_norm_backward_elemt": call(*[floats(2, 4)] * 2, *[floats(4)] * 5, zeros(1, dtype=torch.int32)),
    "batch_norm_backward_reduce": call(*[floats(2, 4)] * 2, *[floats(4)] * 3, True, True, True),
    "batch_norm_elemt": call(floats(2, 4), *[floats(4)] * 4, 1e-5),
    "batch_norm_gather_stats": call(floats(2, 4), *[floats(2, 4)] * 2, *[floats(4)] * 2, 0.1, 1e-5, 4),
    "batch_norm_gather_stats_with_counts": call(
        floats(2, 4), *[floats(2, 4)] * 2, *[floats(4)] * 2, 0.1, 1e-5, floats(2)
    ),
    "batch_norm_stats": call(floats(2, 4), 1e-5),
    "clip": call(floats(4), 0, 1),
    "clip.Tensor": call(floats(4), floats(4)),
    "clip_": call(floats(4), 0, 1),
    "clip_.Tensor": call(floats(4), floats(4)),
    "conv_tbc": call(floats(4, 2, 3), floats(2, 3, 4), floats(4)),
    "conv_tbc_backward": call(floats(3, 2, 4), floats(4, 2, 3), floats(2, 3, 4), floats(4), 0),
    "conv_transpose1d": call(*_1D),
    "conv_transpose2d.input": call(*_2D),
    "conv_transpose3d.input": call(*_3D),
    "convolution": call(*_2D, *_FLAT),
    "convolution_backward": call(floats(1, 2, 2, 2), *_2D[:2], [2], *_FLAT, [True] * 3),
    "cosine_embedding_loss": call(floats(4, 4), floats(4, 4), zeros(4)),
    "cross": call(floats(4, 3), floats(4, 3)),
    "ctc_loss.IntList": call(floats(4, 1, 3), longs(1, 2).reshape(1, 2), [4], [2]),
    "ctc_loss.Tensor": call(floats(4, 1, 3), longs(1, 2).reshape(1, 2), longs(4), longs(2)),
    "diagonal_backward": call(floats(4), [4, 4], 0, 0, 1),
    "divide.Scalar_mode": call(floats(4), 2, rounding_mode="floor"),
    "divide.Tensor_mode": call(floats(4), floats(4), rounding_mode="floor"),
    "divide_.Scalar_mode": call(floats(4), 2, rounding_mode="floor"),
    "divide_.Tensor_mode": call(floats(4), floats(4), rounding_mode="floor"),
    "einsum": call("ij,jk->ik", [floats(4, 4), floats(4, 4)]),
    "embedding_bag": call(floats(4, 4), zeros(4), zeros(1)),
    "embedding_bag.padding_idx": call(floats(4, 4), zeros(4), zeros(1), False, 0, False, None, False, 1),
    "empty_permuted": call([2, 4], [1, 0]),
    "float_power_.Scalar": call(floats(4, dtype=torch.float64), 2),
    "float_power_.Tensor": call(floats(4, dtype=torch.float64), floats(4)),
    "gradient.scalararray": call(floats(4, 4), spacing=1, dim=[0]),
    "gradient.scalarrayarray": call(floats(4, 4), spacing=[1, 1], dim=[0, 1]),
    "gradient.tensorarray": call(floats(4, 4), spacing=[longs(0, 1, 2, 3)], dim=[0]),
    "grid_sampler": call(floats(1, 2, 4, 4), floats(1, 4, 4, 2), 0, 0, False),
    "gru.data": call(*_PACKED, floats(1, 2, 4), _GATES, *_FLAGS),
    "gru.input": call(floats(4, 2, 4), floats(1, 2, 4), _GATES, *_FLAGS, False),
    "gru_cell": call(floats(2, 4), floats(2, 4), *_GATES),
    "histogramdd": call(floats(4, 2), [2, 2]),
    "histogramdd.TensorList_bins": call(floats(4, 2), [longs(0, 1, 2).float(), longs(0, 1, 2).float()]),
    "histogramdd.int_bins": call(floats(4, 2), 2),
    "index_select_backward": call(floats(4, 4), [4, 4], 0, zeros(4)),
    "istft": call(floats(3, 4, dtype=torch.complex64), 4, window=torch.ones(4)),
    "layer_norm": call(floats(2, 4), [4], floats(4), floats(4)),
    "linalg_cond.p_str": call(floats(4, 4), "fro"),
    "linalg_cross": call(floats(4, 3), floats(4, 3)),
    "linalg_ldl_solve": call(floats(4, 4), longs(1, 2, 3, 4).int(), floats(4, 4)),
    "linalg_norm.ord_str": call(floats(4, 4), "nuc"),
    "linalg_tensorinv": call(floats(4, 4).reshape(4, 2, 2), 1),
    "lstm.data": call(*_PACKED, [floats(1, 2, 4)] * 2, _LSTM, *_FLAGS),
    "lstm.input": call(floats(4, 2, 4), [floats(1, 2, 4)] * 2, _LSTM, *_FLAGS, False),
    "lstm_cell": call(floats(2, 4), [floats(2, 4)] * 2, *_LSTM),
    "lu_solve": call(floats(4, 4), floats(4, 4), longs(1, 2, 3, 4).int()),
    "max_pool1d": call(floats(2, 4, 4), [2]),
    "max_pool1d_with_indices": call(floats(2, 4, 4), [2]),
    "max_pool2d": call(floats(2, 4, 4), [2, 2]),
    "max_pool3d": call(floats(2, 4, 4, 4), [2, 2, 2]),
    "meshgrid.indexing": call([floats(4), floats(2)], indexing="xy"),
    "moveaxis.intlist": call(floats(2, 4), [0], [1]),
    "movedim.intlist": call(floats(2, 4), [0], [1]),
    "nll_loss2d": call(floats(1, 2, 4, 4), zeros(1, 4, 4)),
    "normal.out": call(floats(4), out=floats(0)),
    "nuclear_norm.dim": call(floats(4, 4), [0, 1]),
    "polygamma_": call(floats(4), 1),
    "randint.low": call(0, 4, [4]),
    "randint.low_generator": call(0, 4, [4], generator=None),
    "randint_like.low_dtype": call(floats(4), 0, 4),
    "randint_like.low_generator_dtype": call(floats(4), 0, 4, generator=None),
    "resize": call(floats(4), [2]),
    "retain_grad": call(floats(4).requires_grad_()),
    "rms_norm": call(floats(2, 4), [4], floats(4)),
    "rnn_relu.data": call(*_PACKED, floats(1, 2, 4), _RNN, *_FLAGS),
    "rnn_relu.input": call(floats(4, 2, 4), floats(1, 2, 4), _RNN, *_FLAGS, False),
    "rnn_tanh.data": call(*_PACKED, floats(1, 2, 4), _RNN, *_FLAGS),
    "rnn_tanh.input": call(floats(4, 2, 4), floats(1, 2, 4), _RNN, *_FLAGS, False),
    "roll": call(floats(4), [1], [0]),
    "segment_reduce": call(floats(4), "max", lengths=longs(1, 3)),
    "set.source_Storage": call(floats(4), floats(4).untyped_storage()),
    "set.source_Storage_storage_offset": call(floats(4), floats(4).untyped_storage(), 0, [4]),
    "slow_conv3d": call(*_3D[:2], [3, 3, 3], _3D[2]),
    "slow_conv3d_forward": call(*_3D[:2], [3, 3, 3], _3D[2], [1, 1, 1], [0, 0, 0]),
    "slow_conv_dilated2d": call(*_2D[:2], [3, 3], _2D[2]),
    "slow_conv_dilated3d": call(*_3D[:2], [3, 3, 3], _3D[2]),
    "slow_conv_transpose2d": call(*_2D[:2], [3, 3], _2D[2]),
    "slow_conv_transpose3d": call(*_3D[:2], [3, 3, 3], _3D[2]),
    "stft": call(floats(16), 4, window=torch.ones(4), return_complex=True),
    "stft.center": call(floats(16), 4, window=torch.ones(4), return_complex=True),
    "thnn_conv2d": call(*_2D[:2], [3, 3], _2D[2]),
    "to.device": call(floats(4), torch.device("cpu"), torch.float64),
    "trace_backward": call(floats(), [4, 4]),
    "upsample_bicubic2d.vec": call(floats(1, 2, 4, 4), [2, 2], False, None),
    "upsample_bilinear2d.vec": call(floats(1, 2, 4, 4), [2, 2], False, None),
    "upsample_linear1d.vec": call(floats(1, 2, 4), [2], False, None),
    "upsample_nearest1d.vec": call(floats(1, 2, 4), [2], None),
    "upsample_nearest2d.vec": call(floats(1, 2, 4, 4), [2, 2], None),
    "upsample_nearest3d.vec": call(floats(1, 2, 4, 4, 4), [2, 2, 2], None),
    "upsample_trilinear3d.vec": call(floats(1, 2, 4, 4, 4), [2, 2, 2], False, None),
    "view_as_complex_copy": call(floats(4, 2)),
}
