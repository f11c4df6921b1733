"""Where PyTorch's meta kernels differ from its CPU kernels in strides, dtypes, sizes or what they take, by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from torch_tpu.ops.core.schema import signature

aten = torch.ops.aten

Layout = Callable[..., torch.Tensor]


def _by_order(t: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A dense tensor whose dimensions lie in memory in this order, outermost first."""
    inverse = [list(order).index(i) for i in range(t.dim())]
    return torch.empty([t.shape[i] for i in order], dtype=t.dtype, device=t.device).permute(inverse)


def _column_major(t: torch.Tensor, *args: Any) -> torch.Tensor:
    if t.dim() < 2:
        return t  # singular vectors nobody asked for: an empty row
    return _by_order(t, [*range(t.dim() - 2), t.dim() - 1, t.dim() - 2])


def _row_major(t: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _like_input(t: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(t, memory_format=suggest_memory_format(x))


def _rolled(t: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    return _like_input(t, x) if dims else _row_major(t)


def _as_input(t: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(x, dtype=t.dtype)


def _statistics(t: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Mean or inverse deviation: in the dtype of the parameters, if there are any."""
    parameters = [a for a in args if isinstance(a, torch.Tensor)]
    return torch.empty(t.shape, dtype=(parameters or [x])[0].dtype, device=t.device)


def _no_statistics(t: torch.Tensor, *args: Any) -> torch.Tensor:
    return _statistics(t.new_empty(0), *args)


def _batch_statistics(t: torch.Tensor, *args: Any) -> torch.Tensor:
    """Only in training, which is the first flag among the arguments."""
    training = next(a for a in args if isinstance(a, bool))
    return _statistics(t, *args) if training else _no_statistics(t, *args)


def _power(t: torch.Tensor, x: torch.Tensor, exponent: object) -> torch.Tensor:
    """A bool to the power of a bool is a bool; the meta kernel says integer."""
    return t.bool() if x.dtype is torch.bool and isinstance(exponent, bool) else t


def _outermost_first(strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=lambda d: -strides[d])


def _transformed(t: torch.Tensor, strides: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """What a Fourier transform over `dims` of an input with these strides makes: the other dimensions come first."""
    return _by_order(t, [*_outermost_first(strides, [d for d in range(t.dim()) if d not in dims]), *dims])


def _fft_r2c(t: torch.Tensor, x: torch.Tensor, dims: Sequence[int], *args: Any) -> torch.Tensor:
    return _transformed(t, x.stride(), [*_outermost_first(x.stride(), dims[:-1]), dims[-1]])


def _fft_c2r(t: torch.Tensor, x: torch.Tensor, dims: Sequence[int], *args: Any) -> torch.Tensor:
    """A complex transform over all dimensions but the last, then the last."""
    strides = x.stride()
    if len(dims) > 1:
        strides = _transformed(x, strides, _outermost_first(strides, dims[:-1])).stride()
    return _transformed(t, strides, dims[-1:])


def _one_loss(t: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """One sample has one loss, without a dimension."""
    return t if x.dim() > 1 else t.new_empty(())


# By operator and position among its results.
_LAYOUTS: dict[OpOverload, dict[int, Layout]] = {
    aten._batch_norm_no_update.default: {1: _no_statistics, 2: _no_statistics},
    aten._batch_norm_with_update.default: {1: _statistics, 2: _statistics},
    aten._batch_norm_with_update_functional.default: {1: _statistics, 2: _statistics},
    aten._fft_c2r.default: {0: _fft_c2r},
    aten._fft_r2c.default: {0: _fft_r2c},
    aten._fake_quantize_learnable_per_channel_affine.default: {0: _as_input},
    aten._fake_quantize_learnable_per_tensor_affine.default: {0: _as_input},
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: {0: _as_input, 1: _as_input},
    aten._linalg_svd.default: {2: _column_major},
    aten._native_batch_norm_legit.default: {1: _batch_statistics, 2: _batch_statistics},
    aten._native_batch_norm_legit.no_stats: {1: _batch_statistics, 2: _batch_statistics},
    aten._native_batch_norm_legit_functional.default: {1: _batch_statistics, 2: _batch_statistics},
    aten._native_batch_norm_legit_no_training.default: {1: _no_statistics, 2: _no_statistics},
    aten.fake_quantize_per_channel_affine_cachemask.default: {0: _as_input, 1: _as_input},
    aten.fake_quantize_per_tensor_affine_cachemask.default: {0: _as_input, 1: _as_input},
    aten.geqrf.default: {0: _column_major},
    aten.linalg_eig.default: {1: _column_major},
    aten.max_unpool2d.default: {0: _like_input},
    aten.multilabel_margin_loss_forward.default: {0: _one_loss},
    aten.native_batch_norm.default: {1: _batch_statistics, 2: _batch_statistics},
    aten.native_group_norm.default: {1: _statistics, 2: _statistics},
    aten.native_layer_norm.default: {1: _statistics, 2: _statistics},
    aten.nonzero_static.default: {0: _row_major},
    aten.pow.Scalar: {0: _row_major},
    aten.channel_shuffle.default: {0: _like_input},
    aten.native_channel_shuffle.default: {0: _like_input},
    aten.pow.Tensor_Scalar: {0: _power},
    aten.reflection_pad2d.default: {0: _like_input},
    aten.reflection_pad3d.default: {0: _like_input},
    aten.replication_pad2d.default: {0: _like_input},
    aten.replication_pad3d.default: {0: _like_input},
    aten.roll.default: {0: _rolled},
}


# What CPU kernels take and meta kernels refuse, by operator and argument: bytes as a condition or class.
_BYTES_AS: dict[str, dict[str, torch.dtype]] = {
    "where": {"condition": torch.bool},
    "nll_loss_forward": {"target": torch.int64},
    "nll_loss_backward": {"target": torch.int64},
}
_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")


def for_meta(func: OpOverload, values: list[Any]) -> list[Any]:
    """Arguments in dtypes that the operator's meta kernel takes."""
    name = func._schema.name.removeprefix("aten::")
    if name in _BAGS and values[1].dtype is not values[2].dtype:
        # Places and where bags begin are promoted.
        weight, indices, offsets, *rest = values
        common = torch.promote_types(indices.dtype, offsets.dtype)
        return [weight, indices.to(common), offsets.to(common), *rest]
    dtypes = _BYTES_AS.get(name)
    if dtypes is None:
        return values
    return [
        value.to(dtypes[a.name]) if a.name in dtypes and value.dtype is torch.uint8 else value
        for a, value in zip(signature(func).arguments, values, strict=True)
    ]


def as_on_cpu(func: OpOverload, meta: Any, args: tuple[Any, ...]) -> Any:
    """An operator's meta results with the strides, dtypes and sizes its CPU kernel gives them."""
    layouts = _LAYOUTS.get(func)
    if layouts is None:
        return meta
    if isinstance(meta, torch.Tensor):
        return layouts[0](meta, *args)
    return tuple(layouts[i](t, *args) if i in layouts else t for i, t in enumerate(meta))
