"""Changes to libraries that know a fixed list of devices, made when they are imported."""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

import torch

from torch_tpu.device.memory import mem_get_info
from torch_tpu.device.post_import import after_import
from torch_tpu.device.properties import is_available


def install() -> None:
    after_import("accelerate.state", _accelerate_default_device)
    after_import("accelerate.utils.modeling", _accelerate_max_memory)
    # The second module holds the name that it took from the first, if it was imported before the device.
    after_import("safetensors", _safetensors_open)
    after_import("safetensors.torch", _safetensors_open)


def _accelerate_default_device(state: ModuleType) -> None:
    # accelerate takes the CPU when it finds none of the devices it knows.
    original = state.PartialState.default_device.fget

    def default_device(self: Any) -> torch.device:
        device: torch.device = original(self)
        return torch.device("tpu") if device.type == "cpu" and is_available() else device

    default_device.__doc__ = original.__doc__
    state.PartialState.default_device = property(default_device)


def _accelerate_max_memory(modeling: ModuleType) -> None:
    # `device_map="auto"` would put everything on the CPU: the budget has no entry for a device it does not know.
    original = modeling.get_max_memory

    def get_max_memory(max_memory: Any = None) -> Any:
        budget = original(max_memory)
        if max_memory is None and budget.keys() == {"cpu"} and is_available():
            return {0: mem_get_info()[0], **budget}
        return budget

    get_max_memory.__doc__ = original.__doc__
    modeling.get_max_memory = get_max_memory  # type: ignore[attr-defined]


def _safetensors_open(module: ModuleType) -> None:
    # The Rust side refuses `device="tpu"`, so the file is opened for the CPU and each tensor copied as it is read.
    original = getattr(module, "safe_open", None)
    if original is None or getattr(original, "_knows_tpu", False):
        return

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch") or not _names_tpu(device):
            return original(filename, framework, device, **options)
        return _OpenForTpu(original(filename, framework, "cpu", **options), torch.device(device))

    safe_open._knows_tpu = True  # type: ignore[attr-defined]
    safe_open.__doc__ = original.__doc__
    module.safe_open = safe_open  # type: ignore[attr-defined]


def _names_tpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "tpu"


class _OpenForTpu:
    """A safetensors file whose tensors arrive on the device."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file = file
        self._device = device

    def __enter__(self) -> _OpenForTpu:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._file.get_tensors().items()}

    def get_slice(self, name: str) -> _SliceForTpu:
        return _SliceForTpu(self._file.get_slice(name), self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _SliceForTpu:
    """A tensor of a file, of which parts are read by indexing."""

    def __init__(self, part: Any, device: torch.device) -> None:
        self._part = part
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._part[index]
        return tensor.to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
