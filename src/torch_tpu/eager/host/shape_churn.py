"""Small operators whose shapes keep changing: once there are programs for many shapes, further ones run on the host.

`generate()` appends a token at a time to ids and masks, so that the same few operators meet a new length at each step.
A TPU's compiler takes up to a second for a program of each, and the host less than a millisecond to do without. Only
what is exact goes to the host, so that no result depends on which shapes came before: operators that move elements,
and arithmetic of integers and bools. What draws random numbers stays on the device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu import metrics
from torch_tpu.eager.host import copied_arguments, fallback
from torch_tpu.ops.core.argument_mapper import mapped, tensors
from torch_tpu.ops.core.schema import bind, call, signature
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.storage import value_of

# So many shapes of an operator are compiled: nearly three times what a model of fixed shapes needs. Of 13 families of
# Transformers (forward, backward, clipping, AdamW, a copy of the parameters) none had more than six of a kind.
MOST_SHAPES = 16
# A tensor of so many bytes is small.
LARGEST = 64 * 1024
# After so many calls on the host a program for the shape would have paid for itself: compiling takes 17 ms on XLA:CPU
# and up to a second on a TPU, a call on the host 0.06 ms of the processor's time, and on a TPU the wait for the device.
CALLS_WORTH_A_PROGRAM = 1000

# They move elements, whatever the dtype.
_MOVES = re.compile(
    "cat|clone|constant_pad_nd|copy|diagonal_scatter|expand_copy|fill|flip|full|full_like|gather|index|index_copy"
    "|index_fill|index_select|lift_fresh_copy|masked_fill|new_full|new_ones|new_zeros|ones|ones_like|repeat|roll|rot90"
    "|select_scatter|slice_scatter|stack|take|tril|triu|where|zero|zeros|zeros_like"
)
# They are exact where operands, numbers and results are integers and bools.
_COUNTS = re.compile(
    "_to_copy|abs|add|all|amax|amin|any|argmax|argmin|bitwise_(and|not|or|xor)|clamp|clamp_max|clamp_min|cumsum|eq"
    "|floor_divide|fmod|ge|gt|index_add|index_put|isin|le|logical_(and|not|or|xor)|lt|max|maximum|min|minimum|mul|ne|neg"
    "|range|remainder|rsub|scatter|scatter_add|sign|sub|sum"
)

# How many programs there are of each kind of call.
_made: Counter[Any] = Counter()
# Kinds counted at the same time.
MOST_KINDS = 4096


class HostedCall:
    """In place of a plan: a call that the host runs, because its operator has had many shapes."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 1

    def is_worth_a_program(self) -> bool:
        """Counts a call; whether it is one too many for the host."""
        self.calls += 1
        return self.calls > CALLS_WORTH_A_PROGRAM


def kind_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call has in common with those that differ from it in sizes and numbers alone; None if it is not exact."""
    moves = _moves(func)
    if moves is None:
        return None
    kind = (func, *_structure(func, args, kwargs))
    inexact = {p for p in kind if isinstance(p, torch.dtype) and (p.is_floating_point or p.is_complex)}
    # Of two such dtypes one is converted.
    is_exact = len(inexact) < 2 if moves else not (inexact or float in kind or complex in kind)
    return kind if is_exact else None


@cache
def _moves(func: OpOverload) -> bool | None:
    """Whether an operator moves elements; None if it is not exact at all."""
    name = func._schema.name.partition("::")[2].rstrip("_")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    return True if _MOVES.fullmatch(name) else False if _COUNTS.fullmatch(name) else None


@cache
def _sizes(func: OpOverload) -> frozenset[str]:
    """The arguments of an operator that are sizes or places."""
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\??(?:\[\d*\])?\?? (\w+)", str(func._schema)))


def _structure(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    sizes = _sizes(func)
    for argument, value in zip(signature(func).arguments, bind(func, args, kwargs), strict=True):
        if argument.name in sizes:
            continue
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                yield part.dtype
                yield part.dim()
            elif isinstance(part, (float, complex)):
                yield type(part)
            elif not argument.is_data:
                yield part
        yield None


def runs_on_host(kind: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host is to run a call for which there is no program yet."""
    return (
        _made[kind] >= MOST_SHAPES
        and client().runs
        and fallback.policy() != "error"
        and all(value_of(t.untyped_storage()).geometry.nbytes <= LARGEST for t in tensors((args, kwargs)) if t.is_tpu)
        and _result_bytes(func, args, kwargs) <= LARGEST
    )


def made(kind: Any) -> None:
    """Counts a program."""
    if len(_made) > MOST_KINDS:
        _made.clear()
    _made[kind] += 1


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call on the host."""
    name = func.name().removeprefix("aten::").removesuffix(".default")
    metrics.note("hosted", name, f"there are programs for {MOST_SHAPES} shapes; other shapes run on the CPU")
    with metrics.waiting("operator with many shapes"):
        return copied_arguments.run(func, args, kwargs, with_call=_call)


def _result_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    def on_meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    results = _call(func, *mapped((args, kwargs), on_meta, torch.device("meta")))
    return sum(t.numel() * t.element_size() for t in tensors(results))


def _call(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator on tensors of the host or without contents."""
    if func is torch.ops.tpu.range.default:
        length, start, step = args
        return torch.arange(length, device="cpu").mul_(step).add_(start).to(kwargs["dtype"])
    return call(func, args, kwargs)
