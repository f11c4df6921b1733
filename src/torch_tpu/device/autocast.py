"""`torch.autocast("tpu")`: operations that run in the lower precision, in float32, or in the widest of their inputs'.

The lists are CUDA's (ATen/autocast_mode.h), plus the recurrent layers, which CUDA casts inside cuDNN. At load only
the fallthrough is registered; the casts follow at the first autocast region. Casts of weights are not cached between
uses: a program that uses one twice computes the cast once anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function, holding
from torch_tpu.patching.patch_registry import Moment, optional
from torch_tpu.patching.post_import import after_import

Kernel = Callable[..., Any]

LOWER_PRECISION = (
    *("_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"),
    *("conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul"),
    *("einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul"),
    *("linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
    *("rnn_relu_cell", "scaled_dot_product_attention"),
    *("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data"),
    *("rnn_relu.input", "rnn_relu.data"),
)

FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)

# These sum many numbers and take a result dtype: float32 unless the caller names one.
FLOAT32_RESULT = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)

WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
)

BINARY_CROSS_ENTROPY = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
    "Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead."
)

_KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
_EXCLUDED = torch._C.DispatchKeySet(_KEY)
_KEY_NAME = "AutocastPrivateUse1"

_fallthrough = torch.library.Library("_", "IMPL")
_library = torch.library.Library("aten", "IMPL")
_casts_installed = False


def install() -> None:
    """Lets every operation pass the autocast key, and makes bfloat16 the default dtype."""
    _fallthrough.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    torch.set_autocast_dtype("tpu", torch.bfloat16)


def install_casts() -> None:
    """Registers the casts, once."""
    global _casts_installed
    if _casts_installed:
        return
    _casts_installed = True
    for name in LOWER_PRECISION:
        _register(name, _in_lower_precision(_overload(name)))
    for name in FLOAT32:
        _register(name, _in_float32(_overload(name)))
    for name in FLOAT32_RESULT:
        _register(name, _with_float32_result(_overload(name)))
    _register("norm.Scalar", _norm)
    _register("norm.ScalarOpt_dim", _norm_of_dims)
    for name in WIDEST:
        _register(name, _in_widest(_overload(name)))
    _register("binary_cross_entropy", _refuse_binary_cross_entropy)
    pass_higher_order_operators.apply()
    after_import("torch._higher_order_ops.flex_attention", cast_flex_attention.module_imported)


def _register(name: str, kernel: Kernel) -> None:
    _library.impl(name, kernel, _KEY_NAME)


def _overload(name: str) -> Kernel:
    packet, _, overload = name.partition(".")
    found: Kernel = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def _castable(value: Any) -> bool:
    """Whether autocast may change this argument's dtype: floating point on the device, and not float64."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "tpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if _castable(value) else value


def _call(operation: Kernel, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operation(*[_cast(arg, dtype) for arg in args], **{name: _cast(arg, dtype) for name, arg in kwargs.items()})


def _in_lower_precision(operation: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return _call(operation, torch.get_autocast_dtype("tpu"), args, kwargs)

    return kernel


def _in_float32(operation: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return _call(operation, torch.float32, args, kwargs)

    return kernel


def _with_float32_result(operation: Kernel) -> Kernel:
    def kernel(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        # softmax, cumsum and others take dtype by position too.
        named = dtype is not None or any(isinstance(arg, torch.dtype) for arg in args)
        if not named and _castable(tensor):
            dtype = torch.float32
        if dtype is not None:
            kwargs["dtype"] = dtype
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return operation(tensor, *args, **kwargs)

    return kernel


# `norm` takes no result dtype: that makes another overload of it.


def _norm(tensor: torch.Tensor, p: Any = 2) -> torch.Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
        if _castable(tensor):
            return torch.ops.aten.norm.ScalarOpt_dtype(tensor, p, dtype=torch.float32)
        return torch.ops.aten.norm.Scalar(tensor, p)


def _norm_of_dims(tensor: torch.Tensor, p: Any, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
        if _castable(tensor):
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(tensor, p, dim, keepdim, dtype=torch.float32)
        return torch.ops.aten.norm.ScalarOpt_dim(tensor, p, dim, keepdim)


def _in_widest(operation: Kernel) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("tpu")
        for value in _leaves([*args, *kwargs.values()]):
            if _castable(value):
                widest = torch.promote_types(widest, value.dtype)
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return _call(operation, widest, args, kwargs)

    return kernel


def _leaves(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(value if isinstance(value, (list, tuple)) else (value,))
    return flat


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(BINARY_CROSS_ENTROPY)


@optional(
    "autocast of higher-order operators",
    "cond, while_loop, scan and the like run under torch.autocast",
    holding("torch._ops:_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", kind=list),
    holding("torch._ops:_higher_order_ops", kind=dict),
    function("torch._ops:HigherOrderOperator.fallthrough", "dispatch_key"),
    moment=Moment.CALL,
)
def pass_higher_order_operators(changes: Changes) -> None:
    # They pass the key, as PyTorch lets them pass its own devices' keys.
    changes.append(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, _KEY)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)


@optional(
    "autocast of FlexAttention",
    "flex_attention takes part in torch.autocast",
    function("torch._higher_order_ops.flex_attention:flex_attention.py_impl", "k"),
    moment=Moment.CALL,
)
def cast_flex_attention(changes: Changes) -> None:
    from torch._higher_order_ops.flex_attention import flex_attention

    def kernel(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("tpu")
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return flex_attention(*_cast((query, key, value), dtype), *args, **kwargs)

    flex_attention.py_impl(_KEY)(kernel)
