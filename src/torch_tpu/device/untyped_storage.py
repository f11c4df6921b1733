"""What `torch.UntypedStorage` does for `tpu`, where PyTorch has no allocator and the data pointer is a fake.

The size that C++ knows can't change after a storage was made. `resize_` keeps its own size beside it, so a storage may
shrink and grow back, which is what FSDP does to free parameters between uses; it can't grow past its first size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_base: Any = torch._C.StorageBase
_base_new_empty = _base.new
_base_nbytes = _base.nbytes
_base_resize = _base.resize_
_base_byteswap = _base._byteswap
_base_write_file = _base._write_file
_base_set_from_file = _base._set_from_file


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "tpu":
        return _base.__new__(cls, *args, **kwargs)
    from torch_tpu.device.device_index import check_index
    from torch_tpu.tensor.errors import check_fits
    from torch_tpu.tensor.storage import new_storage, uninitialised

    check_index(torch.device(device).index)
    content = args[0] if args else 0
    if isinstance(content, int):
        check_fits(content)
        return new_storage(content, uninitialised(content))
    on_cpu = _base.__new__(cls, content)
    made = new_storage(_base_nbytes(on_cpu), uninitialised(_base_nbytes(on_cpu)))
    return made.copy_(on_cpu)


def _new_empty(self: Any) -> Any:
    return _base_new_empty(self) if self.device.type != "tpu" else torch.UntypedStorage(0, device=self.device)


def nbytes(self: Any) -> int:
    """The number of bytes."""
    resized = getattr(self, "_resized", None)
    size: int = _base_nbytes(self) if resized is None else resized
    return size


def resize_(self: Any, size: int) -> Any:
    """Changes the number of bytes; on `tpu`, up to the size at which the storage was made."""
    if self.device.type != "tpu":
        return _base_resize(self, size)
    from torch_tpu.tensor.storage import uninitialised

    made_with = _base_nbytes(self)
    if size > made_with:
        raise RuntimeError(f"A storage on 'tpu' that was made with {made_with} bytes can't be resized to {size}")
    before = nbytes(self)
    if size == before:
        return self
    if size == 0 or before == 0:
        self.value = uninitialised(size and made_with)
    self._resized = size
    return self


def _write_file(self: Any, file: Any, is_real_file: bool, save_size: bool, element_size: int) -> None:
    source = self if self.device.type != "tpu" else self.cpu()
    _base_write_file(source, file, is_real_file, save_size, element_size)


def _set_from_file(self: Any, file: Any, offset: Any, is_real_file: bool, element_size: int) -> Any:
    if self.device.type != "tpu":
        return _base_set_from_file(self, file, offset, is_real_file, element_size)
    read = _base_set_from_file(torch.UntypedStorage(nbytes(self)), file, offset, is_real_file, element_size)
    return self.copy_(read)


def _byteswap(self: Any, element_size: int) -> None:
    swapped = self.cpu()
    _base_byteswap(swapped, element_size)
    if swapped is not self:
        self.copy_(swapped)


def _getitem(original: Callable[..., Any]) -> Callable[..., Any]:
    def __getitem__(self: Any, index: Any) -> Any:
        if isinstance(index, slice) and self.device.type == "tpu":
            # C++ would make a second storage over a part of the fake address range.
            raise NotImplementedError("A storage on 'tpu' can't be sliced. Slice a tensor that uses it")
        return original(self, index)

    return __getitem__


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        # A non-blocking copy to the host would ask for pinned memory, which needs an allocator too.
        return original(self, device=device, non_blocking=non_blocking and self.device.type != "tpu")

    to.__doc__ = original.__doc__
    return to


def overrides(untyped: Any) -> dict[str, Any]:
    """The attributes of `torch.UntypedStorage` to set, by name."""
    return {
        "__new__": staticmethod(_new),
        "__len__": nbytes,
        "new": _new_empty,
        "nbytes": nbytes,
        "size": nbytes,
        "resize_": resize_,
        "__getitem__": _getitem(untyped.__getitem__),
        "_byteswap": _byteswap,
        "_write_file": _write_file,
        "_set_from_file": _set_from_file,
        "to": _to(untyped.to),
    }
