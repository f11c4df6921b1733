"""Arguments and results in the next wider dtype: what half precision is compared with on every processor.

CPU kernels of half precision differ from processor to processor (what they accumulate in, where they round).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

HALF = (torch.bfloat16, torch.float16)
WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def has_half(nest: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in HALF for leaf in tree_leaves(nest))


def widened(nest: Any, dtype: torch.dtype) -> Any:
    """Leaves as wide as `dtype` in the next wider one, dtypes among the arguments as well."""
    of_width = HALF if dtype in HALF else (torch.float32, torch.complex64)

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in of_width:
            return leaf.detach().to(WIDER[leaf.dtype]).requires_grad_(leaf.requires_grad)
        return WIDER[leaf] if isinstance(leaf, torch.dtype) and leaf in of_width else leaf

    return tree_map(widen, nest)


def rounded(nest: Any, like: Any) -> list[Any]:
    """The leaves of one nest in the dtypes of those of another, which may be only the first ones."""
    pairs = zip(tree_leaves(nest), tree_leaves(like), strict=False)
    return [leaf.to(other.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf, other in pairs]
