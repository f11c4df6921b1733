"""The `torch.compile` backend "tpu": Dynamo's graphs as one XLA program each for forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_tpu.patching.patch_registry import needing_private_names

if TYPE_CHECKING:
    from torch_tpu.compile.inspection import Inspection

# What PyTorch's private names are needed for.
FEATURE = "torch.compile and torch_tpu.export make programs of graphs"


def compile_graph(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The backend "tpu" of `torch.compile`: `compile.backend.compile_graph`."""
    with needing_private_names(FEATURE):
        from torch_tpu.compile import backend
        from torch_tpu.compile.layers import outline  # noqa: F401
    return backend.compile_graph(*args, **kwargs)


def debug(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Inspection:
    """FX graph, StableHLO and optimised HLO of each program of `torch.compile(fn)`: `compile.inspection.inspect`."""
    with needing_private_names(FEATURE):
        from torch_tpu.compile.inspection import inspect

    return inspect(fn, *args, **kwargs)
