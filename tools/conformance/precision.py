"""What a result of half precision, of a fused program, or one that went through many operators, is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_leaves

from tools.compare import Mismatch
from tools.wider import HALF, WIDER
from torch_tpu.eager.mode import EagerMode, get_eager_mode

# Second derivatives are compared in these dtypes, as PyTorch's own tests do: they are sums of many terms that cancel.
DOUBLE = (torch.float64, torch.complex128)


def rounds_elsewhere(dtype: torch.dtype) -> bool:
    """Whether operators in this dtype round at other places than the CPU's.

    In half precision the device computes in float32 and rounds once. A fused program keeps more than one operator's
    rounding to itself: a multiplication and an addition become one instruction.
    """
    return dtype in HALF or (is_fused() and dtype in WIDER)


def is_fused() -> bool:
    return get_eager_mode() is EagerMode.DEFER_AND_FUSE


def moved(nest: Any, dtype: torch.dtype, seed: int) -> None:
    """Multiplies every floating-point tensor by random factors that rounding to `dtype` could hide, in place."""
    generator = torch.Generator().manual_seed(seed)
    for leaf in tree_leaves(nest):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            relative = (torch.rand(leaf.shape, dtype=leaf.dtype, generator=generator) - 0.5) * torch.finfo(dtype).eps
            leaf.data.mul_(1 + relative)


def check_as_accurate(got: Any, want: Any, wide: Any, *, factor: float = 2, nearby: Sequence[Any] = ()) -> None:
    """Every tensor is as near to the CPU's result in the next wider dtype as the CPU's own one is.

    For results of several operators: CPU kernels round intermediate results elsewhere than the device does, and the
    differences add up, in either direction. `factor` times the CPU's error and the default tolerance of the largest
    value are allowed.

    Args:
        nearby: wide results of inputs that differ by rounding. As far as these lie apart, nothing is wrong either.
    """
    columns = zip(*map(tree_leaves, (got, want, wide, *nearby)), strict=True)
    for i, (g, w, x, *others) in enumerate(columns):
        if not isinstance(w, torch.Tensor) or not w.numel():
            continue
        rtol, atol = default_tolerances(w)
        common = torch.promote_types(x.dtype, torch.float64)
        g, w, x, *others = (t.detach().cpu().to(common) for t in (g, w, x, *others))
        finite = w.isfinite() & x.isfinite()
        # Where the wider result is finite and the CPU's is not, or the other way round, neither is wrong.
        if not g[finite].isfinite().all() or g[~w.isfinite() & ~x.isfinite()].isfinite().any():
            raise Mismatch("values", f"result {i}: other infinities than the CPU's: {g} instead of {w}")
        if not finite.any():
            continue
        ours, *theirs = ((t - x)[finite].abs().max().item() for t in (g, w, *others))
        allowed = factor * max(theirs) + atol + rtol * x[finite].abs().max().item()
        if not ours <= allowed:
            raise Mismatch("values", f"result {i}: off by {ours:.3g} from a wider result, the CPU by {max(theirs):.3g}")
