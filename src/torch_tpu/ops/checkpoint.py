"""Activation checkpointing inside programs: the same random numbers again, and computing again only when it is time.

The random state that forward saves and backward starts from is what `torch.tpu.get_rng_state()` returns: 16 bytes, the
seed and the offset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import module, structured
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.registry import lower_higher_order
from torch_tpu.ops.tracing.subgraph import tensor
from torch_tpu.ops.tracing.tracer import Tracer

RANDOM_STATE_BYTES = 16
# `Rng` counts in blocks of four words, the offset in words.
_WORDS = (1, 4)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _After(HigherOrderOperator):
    """`after(value, gates)` is `value`, which a program does not use before it has the gates."""

    def __init__(self) -> None:
        super().__init__("after")

    def __call__(self, value: torch.Tensor, gates: Sequence[torch.Tensor]) -> torch.Tensor:
        return value


after = _After()


@lower_higher_order("after")
def lower_after(tracer: Tracer, value: torch.Tensor, gates: Sequence[torch.Tensor]) -> torch.Tensor:
    array, *signals = (tracer.read(t) for t in (value, *gates) if t.numel())
    if module.target().platform != "cpu":
        return tensor(tracer, structured.optimization_barrier(array, *signals), value.stride())
    # XLA:CPU drops barriers before it orders operations, so the value must depend on the gates: it is selected unless
    # the first element of one is a NaN that no operation makes.
    for signal in signals:
        first = hlo.reshape(hlo.slice_(signal, [0] * signal.ndim, [1] * signal.ndim), ())
        usual = hlo.bitcast(first, _BITS[first.dtype.itemsize]).ne(-1)
        array = hlo.select(usual, array, math.nan if array.dtype.is_floating_point else 0)
    return tensor(tracer, array, value.stride())


@lower_higher_order("run_and_save_rng_state")
def run_and_save_rng_state(tracer: Tracer, operator: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    state = tracer.rng().position() * hlo.constant(_WORDS, torch.uint64)
    saved = tensor(tracer, hlo.reshape(hlo.bitcast(state, torch.uint8), (RANDOM_STATE_BYTES,)))
    with tracer:
        return saved, operator(*args, **kwargs)


@lower_higher_order("run_with_rng_state")
def run_with_rng_state(tracer: Tracer, saved: torch.Tensor, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    words = hlo.bitcast(hlo.reshape(tracer.read(saved), (2, 8)), torch.uint64)
    rng = Rng(hlo.divide(words, hlo.constant(_WORDS, torch.uint64)))
    own, tracer.rng = tracer.rng, lambda: rng
    try:
        with tracer:
            return operator(*args, **kwargs)
    finally:
        tracer.rng = own
