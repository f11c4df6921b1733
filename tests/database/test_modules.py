"""Modules of torch.nn, in float32."""

from __future__ import annotations

import pytest

from tests.database.compare import assert_conforms, in_float32
from tools.conformance.database import Entry


@pytest.mark.parametrize("entry", in_float32("module"), ids=str)
def test_module(entry: Entry) -> None:
    assert_conforms(entry, samples=2)
