"""Bytes as classes, conditions and places of bags, which CPU kernels take and PyTorch's meta kernels do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tools.compare import check


def _bytes(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes(reduction: str) -> None:
    scores = torch.randn(3, 300, requires_grad=True)
    check(lambda x, y: F.nll_loss(x, y, reduction=reduction), scores, _bytes(5, 255, 0))
    check(lambda x, y: F.cross_entropy(x, y, ignore_index=5, reduction=reduction), scores, _bytes(5, 255, 0))


def test_conditions() -> None:
    x, condition = torch.randn(2, 3, requires_grad=True), _bytes(0, 1, 7)
    check(torch.where, condition, x, torch.zeros(3))
    check(lambda c, x: torch.where(c, x, 2.0), condition, x)
    check(lambda c: torch.where(c, 1, 2), condition)
    check(lambda c, x, out: torch.where(c, x, -x, out=out), condition, x.detach(), torch.empty(0))


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.uint8), (torch.int16, torch.int32), (torch.int32, torch.int64)])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_bags(mode: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    table, places, offsets = torch.randn(4, 3, requires_grad=True), torch.tensor([3, 0, 2]), torch.tensor([0, 2])
    for a, b in (dtypes, dtypes[::-1]):
        check(lambda t, i, o: F.embedding_bag(i, t, o, mode=mode), table, places.to(a), offsets.to(b))


def test_bytes_for_both_are_refused() -> None:
    table = torch.ones(4, 3, device="tpu")
    with pytest.raises(RuntimeError, match="Long, Int; but got"):
        F.embedding_bag(_bytes(1, 2).to("tpu"), table, _bytes(0).to("tpu"))
