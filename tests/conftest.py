"""Every test uses the device; an operator without a lowering is an error unless the test allows it."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_TPU_FALLBACK", "error")

import pytest
import torch

import torch_tpu  # noqa: F401  (registers the device where the package is not installed)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
