"""The module `torch.tpu`: the names that users, libraries and PyTorch itself look up there.

Its submodules are the files in `public/`, imported as `torch.tpu.<name>` when first named.
"""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

from torch_tpu.device import cache_statistics, fork, memory_statistics, properties, random_state, streams
from torch_tpu.device.device_index import get_device_index
from torch_tpu.device.generator import default_generator
from torch_tpu.eager import mode

_PUBLIC = Path(__file__).parent / "public"


class device:
    """Makes a device the current one inside a `with` block. There is one, so this only checks the index."""

    def __init__(self, device: Any) -> None:
        self.idx = get_device_index(device, optional=True)
        self.prev_idx = 0

    def __enter__(self) -> device:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class device_of(device):
    """`device` of a tensor or storage; does nothing for one on another device."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "tpu" else None)


def is_in_bad_fork() -> bool:
    """Whether this process was forked after its parent had started the device, so that it can't be used here."""
    return fork.in_bad_fork


def lazy_init() -> None:
    """Raises where the device can't be used. The first operation starts it."""
    fork.check()


class TpuModule(types.ModuleType):
    """`torch.tpu`."""

    @property
    def eager_mode(self) -> mode.EagerMode:
        """The execution mode of the process; may be assigned."""
        return mode.get_eager_mode()

    @eager_mode.setter
    def eager_mode(self, value: mode.EagerMode) -> None:
        mode.use_eager_mode(value)

    @property
    def default_generators(self) -> tuple[Any, ...]:
        """The generator of each device."""
        return (default_generator(),)

    def __getattr__(self, name: str) -> types.ModuleType:
        if name.startswith("_") or not any((_PUBLIC / found).exists() for found in (f"{name}.py", name)):
            raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}")
        return importlib.import_module(f"torch.tpu.{name}")


def build() -> TpuModule:
    """The module object, complete."""
    public: dict[str, Any] = {
        "EagerMode": mode.EagerMode,
        "device": device,
        "device_of": device_of,
        "set_eager_mode": mode.set_eager_mode,
    }
    for source in (memory_statistics, properties, random_state, streams):
        public.update((name, getattr(source, name)) for name in source.__all__)
    module = TpuModule("torch.tpu", "The device `tpu`.")
    module.__dict__.update(
        public,
        **{function.__name__: function for function in cache_statistics.FUNCTIONS},
        __all__=sorted([*public, "default_generators", "eager_mode"]),
        __file__=__file__,
        __path__=[str(_PUBLIC)],
        _initialized=True,
        _is_in_bad_fork=is_in_bad_fork,
        _lazy_init=lazy_init,
        _utils=types.SimpleNamespace(_get_device_index=get_device_index),
    )
    return module
