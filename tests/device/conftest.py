"""Shared by the tests of the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture
def run_python():
    """Runs a script in a new interpreter and returns what it printed."""

    def run(script, **environment):
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
