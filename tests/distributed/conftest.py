"""The processes that most tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World, world


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    """Two processes with a group of the backend `tpu_dist`."""
    with world(2) as made:
        yield made
