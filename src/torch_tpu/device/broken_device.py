"""What stands in for the device when its registration failed: every use raises the original error."""

from __future__ import annotations

import types
from typing import Any, NoReturn

import torch

from torch_tpu.device import privateuse1
from torch_tpu.patching import versions
from torch_tpu.patching.patch_registry import PatchError


class _BrokenModule(types.ModuleType):
    """`torch.tpu` after a failed registration."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("torch.tpu")
        self._error = error

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        # True makes `torch.manual_seed` pass the device by.
        return True

    def manual_seed_all(self, seed: int) -> None:
        raise unusable(self._error)

    def _lazy_init(self) -> None:
        # PyTorch calls this before it makes or moves anything to the device.
        raise unusable(self._error)

    def __getattr__(self, name: str) -> Any:
        # An AttributeError, so that asking `hasattr` breaks no one who does not need the device.
        raise AttributeError(str(unusable(self._error))) from self._error


_libraries: list[torch.library.Library] = []


def unusable(error: BaseException) -> RuntimeError:
    """A fresh error for one use of the device, caused by `error`."""
    version = versions.found("torch")
    newer = f" (torch_tpu was tested with torch {versions.tested('torch')}, this is {version})"
    problem = RuntimeError(
        f"The device 'tpu' could not be registered with PyTorch: {type(error).__name__}: {error}"
        + newer * (versions.is_newer("torch", version) and not isinstance(error, PatchError))
    )
    problem.__cause__ = error
    return problem


def install(error: BaseException) -> None:
    """Makes `torch.tpu` and every operation on `tpu` raise `error`, unless another package has the device's place."""
    if privateuse1.is_taken():
        return

    def raise_error(*args: object, **kwargs: object) -> NoReturn:
        raise unusable(error)

    privateuse1.claim(_BrokenModule(error), usable=False)
    library = torch.library.Library("_", "IMPL")
    library.fallback(raise_error, "PrivateUse1")
    _libraries.append(library)
