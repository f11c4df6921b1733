"""`torch.tpu.random`."""

from torch_tpu.device.random import *  # noqa: F403
from torch_tpu.device.random import __all__ as __all__
