"""The `torch.compile` backend "tpu": Dynamo's graphs as one XLA program each for forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tpu.compile.inspection import Inspection


def debug(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Inspection:
    """FX graph, StableHLO and optimised HLO of each program of `torch.compile(fn)`: `compile.inspection.inspect`."""
    from torch_tpu.compile.inspection import inspect

    return inspect(fn, *args, **kwargs)
