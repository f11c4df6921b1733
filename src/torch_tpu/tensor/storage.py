"""What a storage on the device holds, and how storages and tensors are made.

A storage has a unique fake data pointer, the byte size PyTorch expects, and a Python attribute `value`: the immutable
XLA value its elements have now. Writing re-points `value`; whoever read the old one keeps it. Two storages may hold
the same Value (a clone is free until one of them is written).
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from sys import getrefcount
from typing import Any

import torch

from torch_tpu.hlo.strided import is_dense, storage_elements
from torch_tpu.runtime import memory
from torch_tpu.runtime.client import Buffer

_C: Any = torch._C
_HOST_KERNELS = _C.DispatchKeySet(_C.DispatchKey.CPU)
_set = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_construct = _C._construct_storage_from_data_pointer
_make_empty = _C._acc.create_empty_tensor
_counter = memory.counter


# PyTorch knows it by the name "tpu" as soon as the device is registered.
DEVICE = torch.device("privateuseone", 0)

# Storages of up to 2**k bytes have addresses that are multiples of that, in a range of their own: no lock is needed.
_SMALLEST, _LARGEST = 9, 47
_pointers = [itertools.count((k << 57) + (1 << k), 1 << k) for k in range(_LARGEST + 1)]


def _addresses(nbytes: int) -> Iterator[int]:
    """Addresses for storages of this size that no other storage ever had; nothing is ever read from them."""
    return _pointers[max((nbytes - 1).bit_length(), _SMALLEST)] if nbytes else itertools.repeat(0)


class Geometry:
    """How the dimensions of a value lie in its storage; interned, so that equal ones are the same object.

    Attributes:
        real: the dtype unless it is complex, when tensors may be conjugated.
    """

    __slots__ = ("__weakref__", "addresses", "dtype", "is_complex", "nbytes", "real", "sizes", "strides")

    def __init__(self, sizes: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sizes = sizes
        self.strides = strides
        self.dtype = dtype
        self.is_complex = dtype.is_complex
        self.real = None if dtype.is_complex else dtype
        self.nbytes = math.prod(sizes) * dtype.itemsize
        self.addresses = _addresses(self.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return geometry, (tuple(self.sizes), self.strides, self.dtype)

    def __repr__(self) -> str:
        return f"Geometry({list(self.sizes)}, {list(self.strides)}, {self.dtype})"


# Those that a value, a plan or a signature refers to.
_geometries: weakref.WeakValueDictionary[tuple[torch.Size, tuple[int, ...], torch.dtype], Geometry]
_geometries = weakref.WeakValueDictionary()
_making = threading.Lock()


def geometry(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Geometry:
    """The one Geometry of these sizes, strides (in elements) and dtype. The strides must be dense."""
    key = (torch.Size(sizes), tuple(strides), dtype)
    found = _geometries.get(key)
    if found is None:
        with _making:
            found = _geometries.get(key)
            if found is None:
                found = _geometries[key] = Geometry(*key)
    return found


def flat_geometry(nbytes: int, dtype: torch.dtype = torch.uint8) -> Geometry:
    return geometry((nbytes // dtype.itemsize,), (1,), dtype)


class Content:
    """What a storage holds: a Value, or in fused eager what will have one.

    Attributes:
        graph: what will compute it, if it is not there yet.
    """

    __slots__ = ("__weakref__", "geometry")
    geometry: Geometry
    array: Buffer | None
    graph: Any = None

    def give_up(self) -> None:
        """Its buffer was donated to a program; nothing may ask for it any more."""
        raise NotImplementedError

    @property
    def sizes(self) -> torch.Size:
        return self.geometry.sizes

    @property
    def strides(self) -> tuple[int, ...]:
        return self.geometry.strides

    @property
    def dtype(self) -> torch.dtype:
        return self.geometry.dtype

    @property
    def nbytes(self) -> int:
        return self.geometry.nbytes


class Value(Content):
    """A device buffer with its geometry. `array` is None for memory nobody has written: nothing is allocated yet."""

    __slots__ = ("array",)

    def __init__(self, array: Buffer | None, geometry: Geometry) -> None:
        self.array = array
        self.geometry = geometry
        if array is not None:
            _counter.add(geometry.nbytes)

    def give_up(self) -> None:
        self.array = None
        _counter.remove(self.geometry.nbytes)

    def __del__(self) -> None:
        if self.array is not None:
            _counter.remove(self.geometry.nbytes)


def references(values: Sequence[Any], n: int) -> tuple[int, int]:
    """How many references there are to a value in a list, that of the list among them, and to its buffer.

    The numbers are larger by what Python holds during the call: compare them with `UNSHARED`.
    """
    return getrefcount(values[n]), getrefcount(values[n].array)


class _Unshared:
    """A value that only a list refers to."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array = object()


# What `references` counts if nothing but the list refers to the value, and nothing but the value to its buffer.
UNSHARED = references([_Unshared()], 0)


def uninitialised(nbytes: int, dtype: torch.dtype = torch.uint8) -> Value:
    """A flat value nobody has written."""
    return Value(None, flat_geometry(nbytes, dtype))


def new_storage(nbytes: int, value: Content) -> torch.UntypedStorage:
    """A storage of `nbytes` that holds `value`."""
    storage: torch.UntypedStorage = _construct(next(_addresses(nbytes)), DEVICE, nbytes)
    storage.value = value  # type: ignore[attr-defined]
    return storage


def new_contiguous(sizes: Sequence[int], dtype: torch.dtype, value: Content) -> torch.Tensor:
    """A contiguous tensor over a storage of its own that holds `value`.

    At a third of the cost of `view(new_storage(...))`: PyTorch makes the tensor, whose storage then gets the address
    and size that `new_storage` would have given it.
    """
    tensor: torch.Tensor = _make_empty(sizes, dtype)
    storage = tensor.untyped_storage()
    g = value.geometry
    storage._swap_data_ptr_(_construct(next(g.addresses), DEVICE, g.nbytes))  # type: ignore[attr-defined]
    storage.value = value  # type: ignore[attr-defined]
    return tensor


def value_of(storage: torch.UntypedStorage) -> Content:
    """What the storage holds; a storage that C++ made over one of our pointers gets uninitialised memory."""
    value = getattr(storage, "value", None)
    if value is None:
        value = uninitialised(storage.nbytes())
        storage.value = value  # type: ignore[attr-defined]
    return value


def set_geometry(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Points a device tensor at a place in a storage (PyTorch's own `set_`, which checks the bounds)."""
    result: torch.Tensor = _set(_HOST_KERNELS, tensor, storage, offset, sizes, strides)
    return result


def view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A new tensor over an existing storage."""
    return set_geometry(_make_empty([], dtype), storage, offset, sizes, strides)


def new_tensor(value: Content) -> torch.Tensor:
    """A tensor over a storage of its own that holds `value`, with the value's sizes, strides and dtype."""
    g = value.geometry
    return view(new_storage(g.nbytes, value), g.dtype, 0, g.sizes, g.strides)


def empty_tensor(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with these strides over uninitialised memory."""
    if is_dense(sizes, strides):
        return new_tensor(Value(None, geometry(sizes, strides, dtype)))
    nbytes = storage_elements(sizes, strides) * dtype.itemsize
    return view(new_storage(nbytes, uninitialised(nbytes, dtype)), dtype, 0, sizes, strides)
