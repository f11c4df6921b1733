"""Runs a call on host copies of what its tensors' storages hold; what it writes goes back as a whole.

So tensors that share memory share it on the host too, and a write through a view needs no program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.hlo.strided import shares_elements
from torch_tpu.ops.core import derived
from torch_tpu.ops.core.argument_mapper import mapped, mapped_back, tensors
from torch_tpu.ops.core.schema import bind, call, signature
from torch_tpu.tensor.storage import Content, Value, publishing, value_of
from torch_tpu.tensor.transfer import from_host, host_memory, host_tensor, upload

Call = Callable[[OpOverload, Any, Any], Any]


def run(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    with_call: Call = call,
    before_writing: Callable[[], None] | None = None,
) -> Any:
    """What a call returns. If another thread writes what it has read, the call is made again."""
    while True:
        copies = _Copies(tensors((args, kwargs)))
        host_args, host_kwargs = mapped((args, kwargs), copies.of, torch.device("cpu"))
        returned = with_call(func, host_args, host_kwargs)
        if before_writing is not None:
            before_writing()
            before_writing = None
        written = list(written_tensors(func, args, kwargs))
        updates = [copies.update(t) for t in written]
        with publishing:
            if all(storage.value is old for storage, old, _ in updates):
                for storage, _, new in updates:
                    storage.value = new
                break
    for t in written:
        copies.resize(t)
    return copies.originals(returned)


class _Copies:
    """Host copies of storages, and of the tensors of a call that lie in them."""

    def __init__(self, given: Iterable[Any]) -> None:
        # Some kernels of the CPU (`avg_pool3d`) write results as if these were contiguous, beyond memory that several
        # elements share.
        self._beyond: Counter[int] = Counter()
        for t in given:
            if t.is_tpu and shares_elements(t.shape, t.stride()):
                self._beyond[id(t.untyped_storage())] += t.numel() * t.element_size()
        self._storages: dict[int, tuple[Content, torch.UntypedStorage]] = {}
        self._hosts: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def of(self, t: torch.Tensor) -> torch.Tensor:
        if not t.is_tpu:  # type: ignore[attr-defined]
            return t
        if id(t) not in self._hosts:
            storage = t.untyped_storage()
            if id(storage) not in self._storages:
                value = value_of(storage)
                memory = host_memory(value, storage.nbytes() + self._beyond[id(storage)])
                self._storages[id(storage)] = value, memory
            memory = self._storages[id(storage)][1]
            host = host_tensor(memory, t.dtype, int(t.storage_offset()), t.shape, t.stride())
            host = host.conj() if t.is_conj() else host
            self._hosts[id(t)] = torch._neg_view(host) if t.is_neg() else host
            self._originals[id(self._hosts[id(t)])] = t
        return self._hosts[id(t)]

    def update(self, t: torch.Tensor) -> tuple[Any, Content, Value]:
        """The storage of a written tensor, the value that was read, the new one."""
        storage = t.untyped_storage()
        old, memory = self._storages[id(storage)]
        g = old.geometry
        return storage, old, Value(upload(host_tensor(memory, g.dtype, 0, g.sizes, g.strides)), g)

    def resize(self, t: torch.Tensor) -> None:
        """Resizes an `out` as the call did with its copy."""
        host = self._hosts[id(t)]
        if host.shape != t.shape:
            t.resize_(host.shape)
            HANDWRITTEN["copy_"](t, host)

    def originals(self, value: Any) -> Any:
        """What the call returned, on the device."""
        return mapped_back(value, self._originals, from_host)


def written_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors of the device that a call writes."""
    rule = derived.lowering(func)
    unmarked = rule.mutates if rule is not None else ()
    for argument, value in zip(signature(func).arguments, bind(func, args, kwargs), strict=True):
        if argument.is_written or argument.name in unmarked:
            yield from (t for t in tensors(value) if t.is_tpu)
