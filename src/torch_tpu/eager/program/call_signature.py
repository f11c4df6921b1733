"""What a call's plan depends on, as a key, and what it only takes as data."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from torch_tpu.eager.program.plan import Input, Slot
from torch_tpu.hlo import strided
from torch_tpu.ops.core.derived import IsData
from torch_tpu.recent import Recent
from torch_tpu.tensor.errors import device_mismatch
from torch_tpu.tensor.storage import Content, Geometry, value_of

_matmul_precision = torch._C._get_float32_matmul_precision
_default_dtype = torch.get_default_dtype
_WIDE = frozenset({torch.float64, torch.complex128})
_Tensor = torch.Tensor
LAST_INT64 = 2**63 - 1
_making = threading.Lock()


class ViewKind:
    """A way to view values of one geometry, up to where its slices start. Interned: compared by identity."""

    __slots__ = ()


class Starts(tuple[int, ...]):
    """Where the slices of a view start, which follows from its offset."""

    offset: int


_views: Recent[Any, tuple[ViewKind, Starts]] = Recent(16384)
_view_kinds: Recent[Any, ViewKind] = Recent(16384)


def _view(g: Geometry, t: torch.Tensor) -> tuple[ViewKind, Starts]:
    key = (g, t.shape, t.stride(), t.storage_offset(), t.dtype)
    found = _views.find(key)
    if found is None:
        steps, moving = strided.view_steps(
            tuple(g.sizes), g.strides, tuple(t.shape), t.stride(), int(t.storage_offset()), g.dtype, t.dtype
        )
        starts = Starts(moving)
        starts.offset = int(t.storage_offset())
        with _making:
            of_kind = (g, t.shape, t.stride(), t.dtype, steps)
            kind = _view_kinds.find(of_kind) or _view_kinds.keep(of_kind, ViewKind())
        found = _views.keep(key, (kind, starts))
    return found


class Changed(Exception):
    """Another thread gave a storage that a call writes another geometry: the call begins anew."""


class CallSignature:
    """Collects what a call's plan depends on (`key`) and what it only takes as data."""

    __slots__ = ("data", "hosts", "key", "starts", "storages", "tensors", "values")

    # Slice starts of the tensors that are views with such, by position.
    starts: dict[int, Starts]

    def __init__(self, key: list[Any]) -> None:
        self.key = key
        self.tensors: list[torch.Tensor] = []
        self.values: list[Content] = []
        self.storages: list[Any] = []
        self.starts = {}
        self.data: list[Any] = []
        self.hosts: list[torch.Tensor] = []

    def arguments(self, given: Iterable[Any], data: Iterable[IsData]) -> None:
        """Arguments of an operator. This runs for every call, which is why it calls so little."""
        key, tensors, values, storages = self.key, self.tensors, self.values, self.storages
        for t, is_data in zip(given, data):  # noqa: B905  (defaults are left out, and `strict` costs time)
            if not isinstance(t, _Tensor):
                if is_data is True and t.__class__ is float:
                    key.append(float)
                    self.data.append(t)
                else:
                    self.argument(t, is_data)
                continue
            storage = t.untyped_storage()
            try:
                value = storage.value  # type: ignore[attr-defined]
            except AttributeError:
                if not t.is_tpu:  # type: ignore[attr-defined]
                    self._host(t)
                    continue
                value = value_of(storage)
            g = value.geometry
            if t.shape == g.sizes and t.stride() == g.strides and t.dtype is g.dtype and not t.storage_offset():
                key.append(g)
            else:
                kind, self.starts[len(tensors)] = _view(g, t)
                key.append(kind)
            if g.is_complex and t.is_conj():
                # Matrix products get conjugated views as they are; for other operators PyTorch resolves the bit first.
                key.append("conj")
            tensors.append(t)
            values.append(value)
            storages.append(storage)

    def _host(self, t: torch.Tensor) -> None:
        if t.device.type != "cpu" or t.dim():
            raise device_mismatch(t)
        self.key.append(t.dtype)
        self.hosts.append(t)

    def argument(self, value: Any, is_data: IsData) -> None:
        """Any argument: a tensor, a number that is data, or part of the program."""
        if isinstance(value, _Tensor):
            self.arguments((value,), (False,))
        elif isinstance(value, (list, tuple)):
            self.key.append(len(value))
            for item in value:
                self.argument(item, is_data)
        elif is_data and isinstance(value, (int, float, complex)) and (is_data is True or is_data(value)):
            self.key.append("uint64" if value.__class__ is int and value > LAST_INT64 else type(value))
            self.data.append(value)
        elif isinstance(value, (float, complex, bool)):
            # Equal keys are not enough: 1 == 1.0 == True, 0.0 == -0.0, nan != nan.
            self.key.append(type(value))
            self.key.append(repr(value))
        elif isinstance(value, torch._C.Generator):
            self.key.append(None)
        else:
            self.key.append(value)

    def finish(self) -> tuple[Any, ...]:
        """Adds which tensors share a storage, and PyTorch's settings that decide results."""
        key, storages = self.key, self.storages
        if len(storages) == 2:
            if storages[0] is storages[1]:
                key.append((0, 0))
        elif len(storages) > 2:
            ids = [id(s) for s in storages]
            if len(set(ids)) != len(ids):
                key.append(tuple(ids.index(i) for i in ids))
        key.append(_matmul_precision())
        key.append(_default_dtype())
        return tuple(key)

    def read_again(self, which: Iterable[int]) -> None:
        """Gets the values of some tensors that another thread has written meanwhile.

        Raises:
            Changed
        """
        for i in which:
            value = value_of(self.storages[i])
            if value.geometry is not self.values[i].geometry:
                raise Changed
            self.values[i] = value

    def inputs(self) -> list[Input]:
        ids = [id(s) for s in self.storages]
        result = []
        for n, (t, v, s) in enumerate(zip(self.tensors, self.values, self.storages, strict=True)):
            result.append(
                Input(
                    v.geometry,
                    s.nbytes(),
                    tuple(t.shape),
                    t.stride(),
                    int(t.storage_offset()),
                    t.dtype,
                    ids.index(id(s)),
                    len(self.starts.get(n, ())),
                    t.is_conj(),
                )
            )
        return result


def placeholders(value: Any, sig: CallSignature, is_data: IsData, taken: dict[str, int]) -> Any:
    """`value` with a Slot in place of everything that is not part of the program, in the order `argument` met it."""
    if isinstance(value, _Tensor):
        kind = "input" if value.is_tpu else "host"  # type: ignore[attr-defined]
    elif isinstance(value, (list, tuple)):
        return [placeholders(item, sig, is_data, taken) for item in value]
    elif is_data and isinstance(value, (int, float, complex)) and (is_data is True or is_data(value)):
        kind = "data"
    elif isinstance(value, torch._C.Generator):
        return None
    elif isinstance(value, torch.device):
        return torch.device("meta")
    else:
        return value
    index = taken.get(kind, 0)
    taken[kind] = index + 1
    return Slot(kind, index)


def computes_wide(sig: CallSignature, extra: list[Any]) -> bool:
    """Whether numbers enter the program as float64: some tensor or asked-for dtype has 64-bit floats."""
    dtypes = [t.dtype for t in sig.tensors] + [t.dtype for t in sig.hosts]
    dtypes += [v for v in extra if isinstance(v, torch.dtype)] + [torch.get_default_dtype()]
    return any(d in _WIDE for d in dtypes)
