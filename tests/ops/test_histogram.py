"""Histograms of points."""

from __future__ import annotations

import pytest
import torch

from tools.compare import check

torch.manual_seed(0)
POINTS = torch.randn(4, 25, 2)


@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("limits", [None, [-1.0, 1.0, -2.0, 0.5]])
def test_counts(density: bool, limits: list[float] | None) -> None:
    weight = torch.arange(100.0).reshape(4, 25)
    check(lambda x, w: torch.histogramdd(x, [3, 4], range=limits, weight=w, density=density), POINTS, weight)
    check(lambda x: torch.histogramdd(x, [3, 4], range=limits, density=density), POINTS.double())


def test_edges() -> None:
    edges = (torch.tensor([-1.0, 0.0, 0.5]), torch.tensor([-2.0, -1.0, 0.0, 2.0]))
    check(lambda x, *e: torch.histogramdd(x, e), POINTS, *edges)
    points = torch.tensor([[-1.0, -2.0], [0.5, 2.0], [0.0, 0.0], [9.0, 0.0], [torch.nan, 0.0]])
    check(lambda x, *e: torch.histogramdd(x, e), points, *edges)
