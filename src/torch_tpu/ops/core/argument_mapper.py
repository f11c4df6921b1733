"""A call's arguments with other tensors in their place: host copies, stand-ins to try the CPU with, shapes alone.

Not PyTorch's `tree_map`: each kernel that fails or falls back comes here, and a call has nothing but lists and tuples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.ops.core.schema import call

OnTensor = Callable[[torch.Tensor], Any]


def tensors(value: Any) -> Iterator[Any]:
    """The tensors among arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def mapped(
    value: Any, on_tensor: OnTensor, device: torch.device, on_scalar: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Arguments for another device: with other tensors, and no generator."""
    if isinstance(value, torch.Tensor):
        return on_tensor(value)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch._C.Generator):
        return None
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, on_tensor, device, on_scalar) for item in value])
    if isinstance(value, dict):
        named = {name: item for name, item in value.items() if name != "pin_memory"}
        return {name: mapped(item, on_tensor, device, on_scalar) for name, item in named.items()}
    return on_scalar(value)


def once(on_tensor: OnTensor, known: dict[int, Any]) -> OnTensor:
    """The same for a tensor however often it is among the arguments; `known` gets what for which, by its id."""

    def remembered(t: torch.Tensor) -> Any:
        if id(t) not in known:
            known[id(t)] = on_tensor(t)
        return known[id(t)]

    return remembered


def mapped_back(result: Any, originals: dict[int, torch.Tensor], on_tensor: OnTensor) -> Any:
    """Results with the tensors they were mapped from, by their ids, and `on_tensor` of others."""
    if isinstance(result, torch.Tensor):
        return originals[id(result)] if id(result) in originals else on_tensor(result)
    if isinstance(result, (list, tuple)):
        return type(result)([mapped_back(item, originals, on_tensor) for item in result])
    return result


def cpu_error_with(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_tensor: OnTensor,
    on_scalar: Callable[[Any], Any] = lambda value: value,
) -> Exception | None:
    """What the CPU raises for a call with other tensors; None if it accepts it.

    The trial neither moves the CPU's generator nor warns.
    """
    given, named = mapped((args, kwargs), once(on_tensor, {}), torch.device("cpu"), on_scalar)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            call(func, given, named)
    except Exception as error:
        return error.with_traceback(None)
    return None
