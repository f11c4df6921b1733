"""The entry point `torch.backends`: PyTorch calls `load` at the end of its own import.

`TORCH_DEVICE_BACKEND_AUTOLOAD=0` makes PyTorch skip all such entry points; `import torch_tpu` still registers then.
"""

from __future__ import annotations

import contextlib
import threading

_lock = threading.RLock()
_started = False
_failure: BaseException | None = None


def load() -> None:
    """Registers the device `tpu`, once per process; later calls do nothing.

    A failure here would make `import torch` itself fail, so it is kept, and raised when the device is first used.
    """
    global _started, _failure
    with _lock:
        if _started:
            return
        _started = True
        import torch  # noqa: F401  (its autoload calls `load` again, which must find `_started` set)

        try:
            from torch_tpu.device import registration
            from torch_tpu.distributed import backend_names

            registration.register()
            backend_names.install()
        except Exception as error:
            _failure = error
            # Where even this fails, the device stays unknown to PyTorch, which then says so itself.
            with contextlib.suppress(Exception):
                from torch_tpu.device import broken_device

                broken_device.install(error)


def failure() -> BaseException | None:
    """Why the device could not be registered, or None."""
    return _failure
