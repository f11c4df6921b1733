"""Copies between host tensors and device values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torch_tpu import hooks, metrics
from torch_tpu.hlo import types
from torch_tpu.hlo.strided import contiguous_strides, is_dense
from torch_tpu.runtime.client import Buffer, NoContents, client_errors
from torch_tpu.runtime.process_client import client
from torch_tpu.tensor.errors import translate, user_line
from torch_tpu.tensor.storage import Content, Geometry, Value, geometry, new_tensor, value_of

if TYPE_CHECKING:
    import numpy.typing as npt

# numpy has no dtype for these; their bits travel as an integer of the same width.
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A contiguous host tensor's memory as a numpy array of the same dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = types.numpy_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:
        return np.ascontiguousarray(tensor.numpy()).reshape(tensor.shape)
    bits = tensor.contiguous().view(_AS_INTEGER[dtype.itemsize]).numpy()
    return bits.view(dtype)


def from_numpy(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor over the memory of `array`, which may be read-only: the caller must not write into it."""
    if array.dtype.isbuiltin != 1:
        bits = array.view(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1")
        return _wrap(bits).view(dtype)
    return _wrap(array)


class _Writable:
    """Read-only memory as numpy's array interface for writable memory: torch warns about the former, though what is
    made here is only ever read. Keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _wrap(array: npt.NDArray[Any]) -> torch.Tensor:
    if not array.size:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def upload(tensor: torch.Tensor) -> Buffer:
    """A device buffer with the elements of a host tensor, in its logical order."""
    array = to_numpy(tensor)
    metrics.count("host_to_device_bytes", array.nbytes)
    try:
        return client().put(array)
    except client_errors() as error:
        raise translate(error) from error


def value_from_host(tensor: torch.Tensor) -> Value:
    """A device copy of a host tensor; dense strides are kept, others become contiguous."""
    strides = tensor.stride()
    if not is_dense(tensor.shape, strides):
        tensor = tensor.contiguous()
        strides = tensor.stride()
    return Value(upload(tensor), geometry(tensor.shape, strides, tensor.dtype))


def from_host(tensor: torch.Tensor) -> torch.Tensor:
    """A device tensor with the elements, dtype and (if dense) strides of a host tensor."""
    return new_tensor(value_from_host(tensor))


def contents(buffer: Buffer) -> npt.NDArray[Any]:
    """The elements of a buffer, after waiting for it: a program that failed while it ran says so here."""
    try:
        return client().get(buffer)
    except NoContents as error:
        raise NoContents(f"{error} (read at {user_line()})") from None
    except client_errors() as error:
        raise translate(error) from error


def is_true(buffer: Buffer) -> bool:
    """The value of a 0-d bool buffer, after waiting for it."""
    try:
        return client().get_bool(buffer)
    except client_errors() as error:
        raise translate(error) from error


def host_view(tensor: torch.Tensor, why: str = "copy to the host") -> torch.Tensor:
    """A device tensor's elements on the host, waiting for them; the same sizes and strides. Must not be written into.

    On XLA:CPU this reads the device buffer in place.

    Args:
        why: how a report names this wait.
    """
    value = value_of(tensor.untyped_storage())
    if tensor.numel() == 0:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    with metrics.waiting(why):
        if value.array is None:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if hooks.before_reading is not None:
            hooks.before_reading()
        array = contents(value.array)
    metrics.count("device_to_host_bytes", array.nbytes)
    place = Place(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
    return place_in(from_numpy(array, value.dtype), value.geometry, place)


class Place(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    sizes: Sequence[int]
    strides: Sequence[int]


def place_in(elements: torch.Tensor, g: Geometry, place: Place) -> torch.Tensor:
    """A place in a value, given the value's elements on the host in their logical order."""
    if g.strides != contiguous_strides(g.sizes):
        order = sorted(range(len(g.sizes)), key=lambda d: (-g.strides[d], d))
        elements = elements.permute(order).contiguous()
    flat = elements.reshape(-1).view(place.dtype)
    return flat.as_strided(place.sizes, place.strides, place.offset)


def host_memory(value: Content | None, nbytes: int) -> torch.UntypedStorage:
    """A host storage that begins with the bytes of a value, waiting for it; what has not been written is zero."""
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    if value is not None and value.array is not None:
        if hooks.before_reading is not None:
            hooks.before_reading()
        metrics.count("device_to_host_bytes", value.nbytes)
        elements = from_numpy(contents(value.array), value.dtype)
        host_tensor(memory, value.dtype, 0, value.sizes, value.strides).copy_(elements)
    return memory


def host_tensor(
    memory: torch.UntypedStorage, dtype: torch.dtype, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A host tensor over a place in a host storage."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, offset, tuple(sizes), tuple(strides))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of a device tensor with the same sizes and (if dense) strides."""
    return host_view(tensor).clone()
