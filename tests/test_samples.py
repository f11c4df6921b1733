"""Which sample inputs are taken where not all of them are: some that have elements, wherever those lie."""

from __future__ import annotations

import torch
from torch.testing._internal.opinfo.core import SampleInput

from tools.samples import spread, spread_of_operator, with_elements


def samples(*sizes: int) -> list[SampleInput]:
    return [SampleInput(torch.ones(size), args=(torch.ones(2),), kwargs={"dim": 0}) for size in sizes]


def sizes(found: list[SampleInput]) -> list[int]:
    return [sample.input.numel() for sample in found]


def test_samples_are_spread_over_all():
    assert spread(range(10), 0) == list(range(10))
    assert spread(range(3), 5) == [0, 1, 2]
    assert spread(range(10), 3) == [0, 3, 6]


def test_one_at_least_has_elements():
    assert sizes(spread_of_operator(samples(0, 1, 5, 0, 2, 6), 2)) == [1, 2]
    assert sizes(spread_of_operator(samples(0, 1, 5, 4, 2, 6), 2)) == [0, 4]
    assert sizes(spread_of_operator(samples(0, 0, 0), 2)) == [0, 0]
    assert sizes(with_elements(samples(0, 3))) == [3]
    empty_argument = SampleInput(torch.ones(3), args=(torch.ones(0),))
    assert with_elements([empty_argument, *samples(4)])[0].input.numel() == 4
