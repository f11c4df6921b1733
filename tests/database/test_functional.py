"""Operators of torch.nn.functional, in float32."""

from __future__ import annotations

import pytest

from tests.database.compare import assert_conforms, operators
from tools.conformance.database import Entry


@pytest.mark.parametrize("entry", operators("functional"), ids=str)
def test_operator(entry: Entry) -> None:
    assert_conforms(entry, samples=2)
