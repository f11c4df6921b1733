"""Attention where PyTorch would make strided nested tensors, which the device lacks: padded rows and a mask instead.

That also fits a TPU better: programs depend on the padded length, not on the length of each row.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import function
from torch_tpu.patching.patch_registry import optional

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl("_nested_tensor_from_mask", padded_rows, key)
        _library.impl("_nested_tensor_from_mask_left_aligned", _is_left_aligned, key)


class PaddedRows(torch.Tensor):
    """What `nn.TransformerEncoder` takes for a nested tensor in evaluation: all rows at full length, and their padding.

    Its layers leave their fused path for it, as for every tensor with `__torch_function__`. Attention is told of the
    padding; where the encoder pads the result again, padding becomes the value it asks for.

    Attributes:
        padding: True where a row has ended.
    """

    padding: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        paddings: list[torch.Tensor] = []

        def plain(rows: PaddedRows) -> torch.Tensor:
            if hasattr(rows, "padding"):
                paddings.append(rows.padding)
            return rows.as_subclass(torch.Tensor)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(PaddedRows, plain, (args, kwargs))
            if func is torch.Tensor.to_padded_tensor:
                rows, value = args[:2]
                return rows.masked_fill(paddings[0].unsqueeze(-1), value)
            if func is F.multi_head_attention_forward:
                kwargs.update(key_padding_mask=paddings[0], is_causal=False)
            result = func(*args, **kwargs)
            return tree_map_only(torch.Tensor, lambda t: _with_padding(t, paddings[0]), result) if paddings else result


def _with_padding(rows: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    wrapped = rows.as_subclass(PaddedRows)
    wrapped.padding = padding
    return wrapped


def padded_rows(t: torch.Tensor, mask: torch.Tensor, mask_check: bool = True) -> torch.Tensor:
    """The kernel of `aten::_nested_tensor_from_mask`, which the encoder calls where it would go on with nested rows."""
    if mask_check and not _is_left_aligned(t, mask):
        raise RuntimeError("Expected mask to be left aligned: each row's padding behind its elements")
    return _with_padding(t, mask.logical_not())


def _is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """The kernel of `aten::_nested_tensor_from_mask_left_aligned`."""
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@optional(
    "attention on jagged tensors",
    "attention works on jagged tensors of the device",
    function("torch.nested._internal.sdpa:jagged_scaled_dot_product_attention", "query", "key", "value", "scale"),
    function("torch.nested._internal.sdpa:_can_use_math_sdpa_jagged", "params"),
    function("torch.nested._internal.sdpa:_validate_sdpa_input"),
    function("torch.nested._internal.sdpa:_autocast"),
    after="torch.nested._internal.sdpa",
)
def attend_to_padded_rows(changes: Changes) -> None:
    # For jagged tensors too PyTorch's attention goes through strided nested ones.
    sdpa = changes.module
    original = sdpa.jagged_scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type != "tpu" or query._ragged_idx == 1:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        query, key, value, attn_mask = sdpa._autocast(query, key, value, attn_mask)
        sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if not sdpa._can_use_math_sdpa_jagged(
            torch.backends.cuda.SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa), debug=True
        ):
            raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
        rows, keys, values = (t.transpose(1, 2) for t in (query, key, value))
        lengths = keys.offsets().diff()
        q, k, v = (t.to_padded_tensor(0.0).transpose(1, 2) for t in (rows, keys, values))
        places = torch.arange(k.size(2), device=lengths.device)
        mask = (places < lengths.unsqueeze(1)).unsqueeze(1).unsqueeze(1)
        if attn_mask is not None:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf")) + attn_mask
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
        return nested.nested_from_padded(
            result.transpose(1, 2),
            rows.offsets(),
            ragged_idx=1,
            min_seqlen=rows._maybe_min_seqlen,
            max_seqlen=rows._maybe_max_seqlen,
            sum_S=rows.values().size(0),
        ).transpose(1, 2)

    from torch.nested._internal import nested_tensor as nested

    # Dynamo traces it where it looks like PyTorch's own.
    attention.__code__ = attention.__code__.replace(co_filename=original.__code__.co_filename)
    for module in (sdpa, sys.modules.get("torch.nested._internal.ops")):
        # The second took the function from the first, if it has been imported already.
        if hasattr(module, "jagged_scaled_dot_product_attention"):
            changes.set(module, "jagged_scaled_dot_product_attention", attention)
