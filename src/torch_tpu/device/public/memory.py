"""`torch.tpu.memory`."""

from torch_tpu.device.memory import *  # noqa: F403
from torch_tpu.device.memory import __all__ as __all__
