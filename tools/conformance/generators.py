"""The axis "generators": draws follow from the generator's seed and offset, whichever call makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tools.compare import Mismatch
from tools.conformance.outcome import raised

# Where so many draws on the CPU are not all alike, so many on the device must not be.
DRAWS = 12

Draw = Callable[[str], Any]


def check(draw: Draw) -> None:
    """Results of `draw(device)` repeat with the seed and move on with the generator.

    Args:
        draw: makes a call on fresh copies of the same arguments, and seeds nothing.
    """
    if raised(lambda: draw("cpu")) is not None:
        return  # said by the forward check
    torch.tpu.manual_seed_all(0)
    first = _bits(draw("tpu"))
    after_first = torch.tpu.get_rng_state()
    second = _bits(draw("tpu"))
    if torch.equal(after_first, torch.tpu.get_rng_state()):
        # Nothing random: the same call gives the same.
        _require_equal(second, first, "the second call")
        return
    torch.tpu.manual_seed_all(0)
    _require_equal(_bits(draw("tpu")), first, "the draw after the same seed")
    _require_equal(_bits(draw("tpu")), second, "the second draw after the same seed")
    fresh = torch.Generator("tpu")
    fresh.set_state(after_first)
    torch.tpu.set_rng_state(fresh.get_state())
    _require_equal(_bits(draw("tpu")), second, "the draw of a generator moved on")
    torch.manual_seed(0)
    if not _vary([_bits(draw("cpu")) for _ in range(DRAWS)]):
        return  # such as a dropout of nothing
    draws = [_several(draw, seed) for seed in (0, 1)]
    if not _vary(draws[0]):
        raise Mismatch("draws", f"{DRAWS} draws are alike, the CPU's are not")
    if all(map(_equal, *draws)):
        raise Mismatch("draws", f"{DRAWS} draws are those of another seed")


def _several(draw: Draw, seed: int) -> list[list[Any]]:
    torch.tpu.manual_seed_all(seed)
    return [_bits(draw("tpu")) for _ in range(DRAWS)]


def _bits(results: Any) -> list[Any]:
    """What the results hold now."""
    return [t.detach().to("cpu", copy=True) if isinstance(t, torch.Tensor) else t for t in tree_leaves(results)]


def _vary(draws: list[list[Any]]) -> bool:
    return any(not _equal(draws[0], other) for other in draws[1:])


def _equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    return a.shape == b.shape and torch.allclose(a.to(torch.complex128), b.to(torch.complex128), 0, 0, equal_nan=True)


def _require_equal(got: list[Any], want: list[Any], what: str) -> None:
    if not _equal(got, want):
        raise Mismatch("draws", f"{what} differs: {got} instead of {want}")
