"""What a storage on the device holds, and how storages and tensors are made.

A storage has a unique fake data pointer, the byte size PyTorch expects, and a Python attribute `value`: the immutable
XLA value its elements have now. Writing re-points `value`; whoever read the old one keeps it. Two storages may hold
the same Value (a clone is free until one of them is written). A program that takes the old value's memory first puts a
Taken in its place (`Writing`), so that every other thread gets the value before it or the value after it.
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

from torch_tpu.hlo import types
from torch_tpu.hlo.strided import is_dense, storage_elements
from torch_tpu.runtime import memory_counts
from torch_tpu.runtime.client import Buffer, client_errors
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.errors import translate

_C: Any = torch._C
_HOST_KERNELS = _C.DispatchKeySet(_C.DispatchKey.CPU)
_set = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_construct = _C._construct_storage_from_data_pointer
_make_empty = _C._acc.create_empty_tensor
_counter = memory_counts.counter
_get_ident = threading.get_ident


# PyTorch knows it by the name "tpu" as soon as the device is registered.
DEVICE = torch.device("privateuseone", 0)

# Storages of up to 2**k bytes have addresses that are multiples of that, in a range of their own: no lock is needed.
_SMALLEST, _LARGEST = 9, 47
_pointers = [itertools.count((k << 57) + (1 << k), 1 << k) for k in range(_LARGEST + 1)]


def _addresses(nbytes: int) -> Iterator[int]:
    """Addresses for storages of this size that no other storage ever had; nothing is ever read from them."""
    return _pointers[min(max((nbytes - 1).bit_length(), _SMALLEST), _LARGEST)] if nbytes else itertools.repeat(0)


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
        array: its buffer. Asking for it runs what has to run first.
        graph: what will compute it, if it has not been computed yet.
    """

    __slots__ = ("__weakref__", "geometry")
    geometry: Geometry
    array: Buffer | None
    graph: Any = None

    def initialised(self) -> Buffer:
        """The buffer. Memory that has not been written becomes zeros."""
        return self.array

    def give_up(self) -> None:
        """Its buffer was donated to a program and may not be used any more."""
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


class _Donated:
    """In place of the buffer of a value whose memory a program has taken. Nothing refers to such a value."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("internal error of torch_tpu: a program has reused the memory of this donated value")


DONATED: Any = _Donated()


class Value(Content):
    """A device buffer with its geometry.

    Attributes:
        array: the buffer; None for memory nobody has written, where nothing is allocated; DONATED once it was taken.
    """

    __slots__ = ("array",)

    def __init__(self, array: Buffer | None, geometry: Geometry) -> None:
        self.array = array
        self.geometry = geometry
        if array is not None:
            _counter.add(geometry.nbytes)

    def initialised(self) -> Buffer:
        """The buffer. Memory that has not been written becomes zeros."""
        if self.array is None:
            try:
                zeros = client().zeros(tuple(self.sizes), types.numpy_dtype(self.dtype))
            except (MemoryError, client_errors()) as error:
                raise translate(error) from error
            with _making:
                if self.array is None:
                    self.array = zeros
                    _counter.add(self.nbytes)
        return self.array

    def give_up(self) -> None:
        self.array = DONATED
        _counter.remove(self.geometry.nbytes)

    def __del__(self) -> None:
        if self.array is not None and self.array is not DONATED:
            _counter.remove(self.geometry.nbytes)


class Taken(Content):
    """In a storage while a program starts that takes the old value's memory: who wants to read waits for the new one.

    Once that is there, a Taken stands for it.
    """

    __slots__ = ("_new", "_writing")

    def __init__(self, geometry: Geometry, writing: Writing) -> None:
        self.geometry = geometry
        self._writing: Writing | None = writing
        self._new: Content = self

    def settled(self) -> Content:
        """The new value, after waiting until the program has started."""
        found: Content = self
        while isinstance(found, Taken):
            writing = found._writing
            if writing is not None:
                writing.wait()
            found = found._new
        return found

    @property
    def array(self) -> Buffer | None:  # type: ignore[override]
        return self.settled().array

    def give_up(self) -> None:
        raise AssertionError("only the value it stands for can be donated")


# Held while storages that a writer has read get a new value. Nothing waits for anything inside. A finalizer may run
# there, so the same thread may take it again.
publishing = threading.RLock()


class Writing:
    """The start of a program that computes new values of storages from their old ones: one step for every other thread.

    `take` puts a Taken into each storage. From then on nobody can get the old value, and whoever has it is counted by
    `references`, so that its memory is given to the program only if nobody has. `end` puts back what no new value has
    replaced, and lets those go on who wait.
    """

    __slots__ = ("_ended", "_event", "_owner", "_taken")

    def __init__(self) -> None:
        self._owner = _get_ident()
        self._taken: list[tuple[Any, Taken, Content]] = []
        self._event: threading.Event | None = None
        self._ended = False

    def take(self, storages: Sequence[Any], values: Sequence[Content], which: Sequence[int]) -> bool:
        """Takes some of the storages, if they still hold these values; else none, because another thread wrote one."""
        with publishing:
            for i in which:
                if storages[i].value is not values[i]:
                    return False
            for i in which:
                taken = Taken(values[i].geometry, self)
                # In this order, so that an interruption between the two leaves nothing taken for ever.
                self._taken.append((storages[i], taken, values[i]))
                storages[i].value = taken
        return True

    def wait(self) -> None:
        """Waits for `end`."""
        if self._owner == _get_ident():
            raise RuntimeError("a signal handler or finalizer reads a tensor that its own thread is about to write")
        with publishing:
            event = self._event = self._event or threading.Event()
        # `end` says that it has come before it looks for an event, so one of the two sees the other.
        if not self._ended:
            event.wait()

    def end(self) -> None:
        for storage, taken, old in self._taken:
            new = storage.value
            if new is taken:
                storage.value = new = old
            taken._new = new
            taken._writing = None
        self._taken.clear()
        self._ended = True
        if self._event is not None:
            self._event.set()


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
    """A flat value that has not been written."""
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
    value: Content | None = getattr(storage, "value", None)
    if value is None:
        # Another thread may do the same: the first one's stays.
        value = vars(storage).setdefault("value", uninitialised(storage.nbytes()))
    return value.settled() if isinstance(value, Taken) else value


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
