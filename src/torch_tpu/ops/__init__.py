"""ATen → StableHLO: one file per family of operators, one lowering per operator. `load()` imports them all."""

from __future__ import annotations

import importlib

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
    "flex_attention",
)

_loaded = False


def load() -> None:
    """Imports every family, which fills the registry. Called when the device is first used."""
    global _loaded
    if not _loaded:
        for family in FAMILIES:
            importlib.import_module(f"torch_tpu.ops.{family}")
        _loaded = True
