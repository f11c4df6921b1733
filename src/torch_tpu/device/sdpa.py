"""Routes `scaled_dot_product_attention` to one fused operation, which has a derivative and stays one node in graphs.

Registered at both the autograd key and the device's key: without the first, tracing takes the operation apart; the
second serves inference mode, which skips the first.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel of `aten::scaled_dot_product_attention`.

    The fused operation takes 4-dimensional inputs of equal batch and head counts, and masks that are added. Everything
    else is brought to that form where it can be, and else goes to PyTorch's composite of matmul, softmax and dropout.
    """
    _validate(query, key, value, attn_mask, dropout_p, is_causal)
    if _fused_enabled() and _fits(query, key, value, enable_gqa):
        if attn_mask is not None:
            _validate_dimensions(attn_mask, query, dropout_p)
        return _fused(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if not torch._C._get_math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    if attn_mask is not None:
        # The composite adds every mask, a boolean one as zeros and ones.
        attn_mask = _additive(attn_mask, query.dtype)
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def fused_sdp_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Which kernel the operator would choose, as a member of `torch.nn.attention.SDPBackend`."""
    backends = torch._C._SDPBackend
    if _fused_enabled() and _fits(query, key, value, enable_gqa):
        return backends.OVERRIDEABLE.value
    return backends.MATH.value if torch._C._get_math_sdp_enabled() else backends.ERROR.value


def _fused_enabled() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` allows any kernel that, like the fused one, keeps no score matrix."""
    return (
        torch._C._get_overrideable_sdp_enabled()
        or torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
    )


def _validate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    """PyTorch's own checks, which its kernels for the operation would have made."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p:g}")
    if attn_mask is None:
        return
    if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{attn_mask.dtype} and query.dtype: {query.dtype} instead."
        )
    if is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")


def _validate_dimensions(attn_mask: torch.Tensor, query: torch.Tensor, dropout_p: float) -> None:
    """Where the CPU considers its fused kernel it looks at a mask's last two dimensions; elsewhere it broadcasts."""
    considered = torch._C._get_flash_sdp_enabled() and not attn_mask.requires_grad and not dropout_p
    if attn_mask.dim() < 2 and considered and query.dim() == 4:
        raise IndexError(
            "scaled_dot_product_attention needs an attn_mask of at least 2 dimensions (queries, keys), but got "
            f"attn_mask.dim: {attn_mask.dim()}; unsqueeze it"
        )


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    if query.is_nested or _in_vmap() or not query.dim() == key.dim() == value.dim():
        return False
    if (
        not query.is_floating_point()
        or query.dim() not in (3, 4)
        or query.numel() == 0
        or key.numel() == 0
        or value.numel() == 0
    ):
        return False
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        return False
    if query.shape[-1] != key.shape[-1]:
        return False
    heads, shared = query.shape[-3], key.shape[-3]
    return heads == shared or (enable_gqa and query.dim() == 4 and heads % shared == 0)


def _in_vmap() -> bool:
    """Whether a `vmap` is active: the fused operation has no batching rule."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    contiguous = not _keeps_layout(query, key, value, attn_mask)
    unbatched = query.dim() == 3
    if unbatched:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(0)
    if query.shape[1] != key.shape[1]:
        key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    if attn_mask is not None:
        attn_mask = _additive(attn_mask, query.dtype).expand(*query.shape[:-1], key.shape[-2])
    output = _aten._scaled_dot_product_fused_attention_overrideable.default(
        query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale
    )[0]
    output = output.squeeze(0) if unbatched else output
    return output.contiguous() if contiguous else output


def _keeps_layout(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel of the CPU's takes this, whose result lies in memory as the query does.

    Everything else goes to the composite there, whose result is contiguous.
    """
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return False
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() == 3):
        return False
    return all(tensor.stride(-1) == 1 for tensor in (query, key, value))


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head of `tensor` several times in a row, as grouped-query attention pairs them with the query's."""
    batch, shared, length, width = tensor.shape
    repeated = tensor.unsqueeze(2).expand(batch, shared, heads // shared, length, width)
    return repeated.reshape(batch, heads, length, width)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to the scores: a boolean one says where to look."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))
