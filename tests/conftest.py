"""Every test uses the device; an operator without a lowering is an error unless the test allows it."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_TPU_FALLBACK", "error")

import pytest
import torch
import torch._functorch.config

from torch_tpu import metrics  # registers the device where the package is not installed

# Graphs that an earlier run left in PyTorch's cache would not be captured again, so tests would not see how.
torch._functorch.config.enable_autograd_cache = False


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """No test sees the random state or the counts of those that ran before it in its process."""
    torch.manual_seed(0)
    metrics.reset()
