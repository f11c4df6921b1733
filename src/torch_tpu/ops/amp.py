"""Gradient scaling for mixed precision (`torch.amp.GradScaler`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import structured
from torch_tpu.hlo.array import Array, ArrayLike
from torch_tpu.ops.core.promotion import cast, compute_dtype
from torch_tpu.ops.core.registry import lower


@lower("_amp_foreach_non_finite_check_and_unscale_")
def unscale(grads: Sequence[Array], found_inf: Array, inv_scale: Array) -> list[Array]:
    """Multiplies every gradient by `inv_scale`; `found_inf` becomes 1 if any of them has an infinity or NaN."""
    unscaled = []
    found = hlo.reshape(found_inf, ())
    for grad in grads:
        wide = cast(grad, compute_dtype(grad.dtype))
        finite = structured.reduce_and(hlo.is_finite(wide), range(wide.ndim))
        found = hlo.select(finite, found, 1)
        unscaled.append(wide * cast(hlo.reshape(inv_scale, ()), wide.dtype))
    return [*unscaled, hlo.reshape(found, found_inf.shape)]


@lower("_amp_update_scale_")
def update_scale(
    scale: Array,
    growth_tracker: Array,
    found_inf: Array,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: int,
) -> tuple[Array, Array]:
    """Backs off after an infinity; grows after `growth_interval` steps without one, unless that overflows."""
    growth_factor, backoff_factor = cast([growth_factor, backoff_factor], scale.dtype)
    shapes = scale.shape, growth_tracker.shape
    # Each of them has one element, in any number of dimensions.
    scale, growth_tracker, found_inf = (hlo.reshape(x, ()) for x in (scale, growth_tracker, found_inf))
    found = found_inf.ne(0)
    successes = growth_tracker + 1
    due = successes.eq(growth_interval)
    grown = scale * growth_factor
    larger = hlo.select(due & hlo.is_finite(grown), grown, scale)
    results = hlo.select(found, scale * backoff_factor, larger), hlo.select(found | due, 0, successes)
    return hlo.reshape(results[0], shapes[0]), hlo.reshape(results[1], shapes[1])
