"""The `*_copy` operators that PyTorch gives no decomposition: a view's elements in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu.ops.core.registry import decompose

aten = torch.ops.aten

_VIEWS: dict[str, Callable[..., Any]] = {
    "_conj_copy": aten._conj.default,
    "_fw_primal_copy": lambda x, level: x,
    "_make_dual_copy": lambda primal, tangent, level: primal,
    "_neg_view_copy": aten._neg_view.default,
    "_reshape_alias_copy": aten._reshape_alias.default,
    "detach_copy": aten.detach.default,
    "lift_fresh_copy": lambda x: x,
    "select_copy.int": aten.select.int,
    "slice_copy.Tensor": aten.slice.Tensor,
    "split_copy.Tensor": aten.split.Tensor,
    "view_as_complex_copy": aten.view_as_complex.default,
    "view_as_real_copy": aten.view_as_real.default,
}


def _copies(view: Callable[..., Any]) -> Callable[..., Any]:
    def copy(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.clone(memory_format=torch.contiguous_format)
        return [r.clone(memory_format=torch.contiguous_format) for r in result]

    return copy


for _name, _view in _VIEWS.items():
    decompose(_name)(_copies(_view))
