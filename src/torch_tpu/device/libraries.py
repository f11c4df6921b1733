"""Changes to libraries that know a fixed list of devices, made when they are imported."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from torch_tpu.device.memory_statistics import mem_get_info
from torch_tpu.device.properties import is_available
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import a_class, a_property, function
from torch_tpu.patching.patch_registry import optional


@optional(
    "accelerate: device",
    "accelerate selects the device by itself",
    a_property("accelerate.state:PartialState.default_device"),
    after="accelerate.state",
)
def accelerate_default_device(changes: Changes) -> None:
    # accelerate takes the CPU when it finds none of the devices it knows.
    partial_state = changes.module.PartialState
    original = partial_state.default_device.fget

    def default_device(self: Any) -> torch.device:
        device: torch.device = original(self)
        return torch.device("tpu") if device.type == "cpu" and is_available() else device

    default_device.__doc__ = original.__doc__
    changes.set(partial_state, "default_device", property(default_device))


@optional(
    "accelerate: memory",
    'accelerate counts the device\'s memory for device_map="auto"',
    function("accelerate.utils.modeling:get_max_memory", "max_memory"),
    after="accelerate.utils.modeling",
)
def accelerate_max_memory(changes: Changes) -> None:
    # `device_map="auto"` would put everything on the CPU: the budget has no entry for a device it does not know.
    original = changes.module.get_max_memory

    def get_max_memory(max_memory: Any = None) -> Any:
        budget = original(max_memory)
        if max_memory is None and budget.keys() == {"cpu"} and is_available():
            return {0: mem_get_info()[0], **budget}
        return budget

    get_max_memory.__doc__ = original.__doc__
    changes.set(changes.module, "get_max_memory", get_max_memory)


def safetensors_open(changes: Changes) -> None:
    # The Rust side refuses `device="tpu"`, so the file is opened for the CPU and each tensor copied as it is read.
    original = changes.module.safe_open

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch") or not _names_tpu(device):
            return original(filename, framework, device, **options)
        return _OpenForTpu(original(filename, framework, "cpu", **options), torch.device(device))

    safe_open.__doc__ = original.__doc__
    changes.set(changes.module, "safe_open", safe_open)


# The second module holds the name that it took from the first, if it was imported before the device.
for _module in ("safetensors", "safetensors.torch"):
    optional(
        f"{_module}: open",
        "safetensors files can be loaded onto the device",
        a_class(f"{_module}:safe_open", "get_tensor", "get_slice"),
        after=_module,
    )(safetensors_open)


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
