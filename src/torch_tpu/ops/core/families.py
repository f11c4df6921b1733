"""The families of lowerings, each loaded when one of its operators is first traced.

Which operators a family has is known when it is loaded. An index that an earlier process wrote to the disk
(`eager.overload_table`) says it before; without one, the first question loads all families.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from types import FrameType

FAMILIES = (
    "assertion",
    "elementwise",
    "transcendental",
    "rounding",
    "bitwise",
    "complex",
    "special",
    "bessel",
    "polynomials",
    "creation",
    "reduction",
    "matmul",
    "convolution",
    "pooling",
    "max_pooling",
    "resize",
    "fft",
    "vision",
    "grouped_matmul",
    "normalization",
    "batch_norm",
    "attention",
    "recurrent",
    "linalg",
    "ldl",
    "spectral",
    "norm",
    "scan",
    "indexing",
    "subscript",
    "scatter",
    "join",
    "view_copies",
    "jagged",
    "padding",
    "embedding",
    "activation",
    "softmax",
    "loss",
    "class_loss",
    "ctc",
    "distributions",
    "sampling",
    "gamma_gradient",
    "optimizer",
    "amp",
    "fake_quantize",
    "sorting",
    "order_statistics",
    "search",
    "sparse_indices",
    "segment_reduce",
    "padded_results",
    "control_flow",
    "checkpoint",
    "collectives",
    "flex_attention",
)

# A family's module counts as loaded when its import has come to its end, not when some of it is registered.
_lock = threading.RLock()
_loaded: set[str] = set()
_index: Mapping[str, str] | None = None


def load() -> None:
    """Imports every family, which fills the registry."""
    for family in FAMILIES:
        _load(family)


def load_family_of(name: str) -> None:
    """Imports the family that has the lowering or decomposition of an operator (by the registry's name), if any has."""
    if len(_loaded) == len(FAMILIES):
        return
    if _index is None:
        load()
    elif name in _index:
        _load(_index[name])


def _load(family: str) -> None:
    if family not in _loaded:
        with _lock:
            importlib.import_module(f"torch_tpu.ops.{family}")
            _loaded.add(family)


def use_index(index: Mapping[str, str]) -> None:
    """Says which family has the lowering or decomposition of each operator."""
    global _index
    _index = index


def registering() -> str:
    """The family whose import registers an operator now; empty outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").rpartition(".")
        if package == "torch_tpu.ops" and module in FAMILIES and frame.f_code.co_name == "<module>":
            return module
        frame = frame.f_back
    return ""
