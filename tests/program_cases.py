"""The programs that `make test` runs, cut into test files so that they can run at the same time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.random_programs.check import check

PROGRAMS_PER_TEST = 10


def program_test(first: int, count: int) -> Callable[[int], None]:
    """A test of the programs of `count` seeds, ten at a time."""

    @pytest.mark.parametrize("seed", range(first, first + count, PROGRAMS_PER_TEST))
    def test_the_devices_agree(seed: int) -> None:
        for each in range(seed, seed + PROGRAMS_PER_TEST):
            report = check(each)
            if report is not None:
                pytest.fail(f"seed {each}: {report}", pytrace=False)

    return test_the_devices_agree
