"""What a result of half precision, or one that went through many operators, is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_leaves, tree_map

from tests.compare import Mismatch

# Second derivatives are compared in these dtypes, as PyTorch's own tests do: they are sums of many terms that cancel.
DOUBLE = (torch.float64, torch.complex128)
HALF = (torch.bfloat16, torch.float16)


def as_float32(nest: Any) -> Any:
    """Leaves of half precision as float32, dtypes among the arguments as well."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF:
            return leaf.detach().float().requires_grad_(leaf.requires_grad)
        is_half = isinstance(leaf, torch.dtype) and leaf in HALF
        return torch.float32 if is_half else leaf

    return tree_map(widen, nest)


def rounded(nest: Any, like: Any) -> list[Any]:
    """The leaves of one nest in the dtypes of those of another, which may be only the first ones."""
    pairs = zip(tree_leaves(nest), tree_leaves(like), strict=False)
    return [leaf.to(other.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf, other in pairs]


def check_as_accurate(got: Any, want: Any, wide: Any, *, factor: float = 2) -> None:
    """Every half-precision tensor is as near to the CPU's float32 result as the CPU's own half-precision one is.

    For results of several operators: CPU kernels round intermediate results elsewhere than the device does, and the
    differences add up, in either direction. `factor` times the CPU's error and the default tolerance of the largest
    value are allowed.
    """
    for i, (g, w, x) in enumerate(zip(tree_leaves(got), tree_leaves(want), tree_leaves(wide), strict=True)):
        if not isinstance(w, torch.Tensor) or not w.numel():
            continue
        rtol, atol = default_tolerances(w)
        g, w, x = (t.detach().cpu().float() for t in (g, w, x))
        finite = w.isfinite() & x.isfinite()
        if not g[finite].isfinite().all():
            raise Mismatch("values", f"result {i}: other infinities than the CPU's: {g} instead of {w}")
        if not finite.any():
            continue
        theirs, ours = ((t - x)[finite].abs().max().item() for t in (w, g))
        allowed = factor * theirs + atol + rtol * x[finite].abs().max().item()
        if not ours <= allowed:
            raise Mismatch("values", f"result {i}: off by {ours:.3g} from float32, the CPU by {theirs:.3g}")
