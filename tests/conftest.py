"""Every test uses the device; an operator without a lowering is an error unless the test allows it."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TORCH_TPU_FALLBACK", "error")

import pytest
import torch
import torch._functorch.config

from tools import platforms
from torch_tpu import metrics  # registers the device where the package is not installed
from torch_tpu.eager.program import stored_plans

# Graphs that an earlier run left in PyTorch's cache would not be captured again, so tests would not see how.
torch._functorch.config.enable_autograd_cache = False
# Nor would operators be traced whose plans it left in the disk cache.
stored_plans.keeps_operators = False

# Tests of what a plug-in does in another way than jaxlib's XLA:CPU.
OF_PLUGINS = Path(__file__).with_name("plugin")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform", default="", help=f"Runs the tests on {platforms.PLUGIN}, or what TORCH_TPU_PLATFORM may name."
    )


def pytest_configure(config: pytest.Config) -> None:
    platforms.choose(config.getoption("--platform"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == OF_PLUGINS and config.getoption("--platform") != platforms.PLUGIN else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--platform") != platforms.PLUGIN:
        return
    for item in items:
        needs = item.get_closest_marker("jaxlib_cpu")
        if platforms.plugin_library() is None:
            item.add_marker(pytest.mark.skip(reason=platforms.PLUGIN_IS_MISSING))
        elif needs is not None:
            item.add_marker(pytest.mark.skip(reason=needs.args[0]))


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """No test sees the random state or the counts of those that ran before it in its process."""
    torch.manual_seed(0)
    metrics.reset()
    torch.tpu.reset_accumulated_memory_stats()
