"""Operators of torch and torch.Tensor whose names begin with J to Z, in float32."""

from __future__ import annotations

import pytest

from tests.database.compare import assert_conforms, operators
from tools.conformance.database import Entry


@pytest.mark.parametrize("entry", operators("j to z"), ids=str)
def test_operator(entry: Entry) -> None:
    assert_conforms(entry, samples=2)
