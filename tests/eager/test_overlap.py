"""Writes whose source or index shares memory with their target: refused where the CPU refuses, else with its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

EagerMode = torch.tpu.EagerMode
# Of a target and a tensor of the same shape and dtype that may share memory with it.
Write = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.tpu.set_eager_mode(request.param):
        yield


def _order(y: torch.Tensor) -> torch.Tensor:
    return torch.tensor([2, 0, 1], device=y.device)


def _even(y: torch.Tensor) -> torch.Tensor:
    return torch.tensor([True, False, True], device=y.device)


WRITES: dict[str, Write] = {
    "index_put": lambda x, y: x.index_put_((_order(x),), y),
    "index_put that adds": lambda x, y: x.index_put_((_order(x),), y, accumulate=True),
    "assignment to positions": lambda x, y: x.__setitem__(_order(x), y),
    "assignment to a mask": lambda x, y: x.__setitem__(_even(x), y[:2]),
    "one number to a mask": lambda x, y: x.__setitem__(_even(x), y[1]),
    "scatter": lambda x, y: x.scatter_(0, _order(x), y),
    "scatter_add": lambda x, y: x.scatter_add_(0, _order(x), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce_(0, _order(x), y, "amax"),
    "index_add": lambda x, y: x.index_add_(0, _order(x), y),
    "index_copy": lambda x, y: x.index_copy_(0, _order(x), y),
    "index_fill": lambda x, y: x.index_fill_(0, _order(x), y[0]),
    "index_reduce": lambda x, y: x.index_reduce_(0, _order(x), y, "amax"),
    "masked_fill": lambda x, y: x.masked_fill_(_even(x), y[0]),
    "put": lambda x, y: x.put_(_order(x), y),
    "copy": lambda x, y: x.copy_(y),
    "add": lambda x, y: x.add_(y),
    "lerp": lambda x, y: x.lerp_(y, 0.5),
    "addcmul": lambda x, y: x.addcmul_(y, y),
    "list": lambda x, y: torch._foreach_add_([x], [y]),
    "gather into out": lambda x, y: torch.gather(y, 0, _order(x), out=x),
    "take into out": lambda x, y: torch.take(y, _order(x), out=x),
    "index_select into out": lambda x, y: torch.index_select(y, 0, _order(x), out=x),
    "cumsum into out": lambda x, y: torch.cumsum(y, 0, out=x),
    "cat into out": lambda x, y: torch.cat([y[:1], y[1:]], out=x),
    "add into out": lambda x, y: torch.add(y, 1, out=x),
    "where into out": lambda x, y: torch.where(_even(x), y, y + 1, out=x),
    "sort into out": lambda x, y: torch.sort(y, out=(x, _order(x))),
    "addr into out": lambda x, y: torch.addr(y[None], torch.ones_like(y[:1]), y, out=x[None]),
}


def _same(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor([3.0, 1.0, 2.0], device=device)
    return x, x, x


def _all(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor([3.0, 1.0, 2.0], device=device)
    return x, x, x.view(3)


def _part(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor([3.0, 1.0, 2.0, 5.0], device=device)
    return x, x[1:], x[:3]


def _beside(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], device=device)
    return x, x[3:], x[:3]


def _outcome(write: Write, make: Callable[[str], tuple[torch.Tensor, ...]], device: str) -> tuple[str, list[float]]:
    base, target, other = make(device)
    before = base.tolist()
    try:
        write(target, other)
    except RuntimeError as error:
        assert base.tolist() == before
        return str(error).splitlines()[0], before
    return "", base.tolist()


@pytest.mark.parametrize("make", [_same, _all, _part, _beside])
@pytest.mark.parametrize("name", WRITES)
def test_as_on_the_cpu(name: str, make: Callable[[str], tuple[torch.Tensor, ...]]) -> None:
    write = WRITES[name]
    known = _outcome(write, make, "cpu")
    # The second time, what the CPU says is known.
    assert [_outcome(write, make, "tpu") for _ in range(2)] == [known] * 2


def test_index_that_is_its_target() -> None:
    writes: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "index_put": lambda x, ones: x.index_put_((x,), ones),
        "scatter": lambda x, ones: x.scatter_(0, x, ones),
        "scatter_add": lambda x, ones: x.scatter_add_(0, x, ones),
        "index_add": lambda x, ones: x.index_add_(0, x, ones),
        "index_copy": lambda x, ones: x.index_copy_(0, x, ones),
        "index_fill": lambda x, ones: x.index_fill_(0, x, 1),
        "put": lambda x, ones: x.put_(x, ones),
        "gather into out": lambda x, ones: torch.gather(ones, 0, x, out=x),
        "take into out": lambda x, ones: torch.take(ones, x, out=x),
    }
    refused: dict[str, list[str]] = {"cpu": [], "tpu": []}
    for device, names in refused.items():
        for name, write in writes.items():
            x = torch.tensor([2, 0, 1], device=device)
            try:
                write(x, torch.ones_like(x))
            except RuntimeError as error:
                names.append(f"{name}: {error}".splitlines()[0])
            kept = x.tolist() == [2, 0, 1]
            assert kept == (name in (n.partition(":")[0] for n in names))
    assert refused["tpu"] == refused["cpu"]
    assert len(refused["tpu"]) >= 6


def test_what_is_written_elsewhere_later() -> None:
    """Whether arguments overlap follows from offsets, which are no part of a program."""
    x = torch.arange(6.0, device="tpu")
    x[:3].copy_(x[3:])
    with pytest.raises(RuntimeError, match="unsupported operation"):
        x[:3].copy_(x[2:5])
    x[3:].copy_(x[:3])
    assert x.tolist() == [3, 4, 5, 3, 4, 5]
