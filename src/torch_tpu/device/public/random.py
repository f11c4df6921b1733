"""`torch.tpu.random`."""

from torch_tpu.device.random_state import *  # noqa: F403
from torch_tpu.device.random_state import __all__ as __all__
