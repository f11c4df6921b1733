"""Operators of torch.nn.functional, in float32."""

from __future__ import annotations

import pytest

from tests.conformance.database import Entry
from tests.database.compare import assert_conforms, operators


@pytest.mark.parametrize("entry", operators("functional"), ids=str)
def test_operator(entry: Entry) -> None:
    assert_conforms(entry, samples=2)
