"""Shared by the tests of the device: reference values come from PyTorch on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import torch_tpu  # noqa: F401  (registers the device where PyTorch's autoload is off)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def run_python():
    """Runs a script in a new interpreter and returns what it printed."""

    def run(script, **environment):
        import os

        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | environment,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run
