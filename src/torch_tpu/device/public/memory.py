"""`torch.tpu.memory`."""

from torch_tpu.device import no_allocator as _no_allocator
from torch_tpu.device.memory_statistics import *  # noqa: F403
from torch_tpu.device.memory_statistics import __all__ as __all__

globals().update(_no_allocator.REFUSALS, _record_memory_history=_no_allocator.record_memory_history)
