"""Writes to tensors whose elements share memory, expanded ones and windows that overlap, as the CPU allows them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_tpu import metrics

EagerMode = torch.tpu.EagerMode
Write = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Where the order of elements decides, the CPU does it.
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    # PyTorch warns that such writes are deprecated.
    with warnings.catch_warnings(action="ignore"), torch.tpu.set_eager_mode(request.param):
        yield


def _at(x: torch.Tensor, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=x.device)


def _values(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel()), device=x.device).reshape(sizes)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(12, device=x.device).reshape(4, 3) % 5) == 1


WRITES: dict[str, Write] = {
    "masked_fill": lambda x: x.masked_fill_(_scattered(x), 9.0),
    "masked_fill of a tensor": lambda x: x.masked_fill_(_scattered(x), torch.tensor(9.0, device=x.device)),
    "index_fill": lambda x: x.index_fill_(0, _at(x, 1, 2), 9.0),
    "index_fill of a tensor": lambda x: x.index_fill_(1, _at(x, 1), torch.tensor(9.0, device=x.device)),
    "index_put": lambda x: x.index_put_((_at(x, 0, 2), _at(x, 1, 2)), _values(x, 2)),
    "index_put in the order of indices": lambda x: x.index_put_((_at(x, 1, 0, 1), _at(x, 2, 0, 1)), _values(x, 3) + 6),
    "index_put of what was there": lambda x: x.index_put_((_at(x, 1, 1), _at(x, 0, 2)), _values(x, 2) + 1),
    "index_put of rows": lambda x: x.index_put_((_at(x, 1, 2),), _values(x, 2, 3)),
    "index_put that adds": lambda x: x.index_put_((_at(x, 0, 2, 0), _at(x, 1, 2, 2)), _values(x, 3), accumulate=True),
    "index_put by a mask": lambda x: x.index_put_((x > 1,), torch.tensor(7.0, device=x.device)),
    "rows by a mask": lambda x: x.index_put_(
        (torch.tensor([True, False, True, False], device=x.device),), _values(x, 2, 3)
    ),
    "masked assignment": lambda x: x.__setitem__(x > 2, 1.0),
    "rows": lambda x: x.__setitem__(_at(x, 0, 2), 1.0),
    "slice": lambda x: x.__setitem__(slice(0, 2), 1.0),
    "element": lambda x: x.__setitem__((1, 2), 5.0),
    "tril": lambda x: x.tril_(),
    "triu": lambda x: x.triu_(),
    "threshold": lambda x: F.threshold_(x, 2.0, 0.0),
    "conj_physical": lambda x: x.conj_physical_(),
    "fill": lambda x: x.fill_(3),
    "fill of a tensor": lambda x: x.fill_(torch.tensor(3.0, device=x.device)),
    "zero": lambda x: x.zero_(),
    "zero of a list": lambda x: torch._foreach_zero_([x]),
    "copy": lambda x: x.copy_(_values(x, 4, 3)),
    "relu": lambda x: x.relu_(),
    "clamp": lambda x: x.clamp_(2, 3),
    "scatter": lambda x: x.scatter_(1, _at(x, 0, 1)[None], 2.0),
}
# Those that the CPU does, because the order of elements decides.
ORDERED: dict[str, Write] = {
    "copy of columns": lambda x: x.copy_(_values(x, *x.shape[::-1]).T),
    "add": lambda x: x.add_(1),
    "add of a tensor": lambda x: x.add_(_values(x, *x.shape)),
    "mul": lambda x: x.mul_(2),
    "div": lambda x: x.div_(_values(x, *x.shape) + 1),
    "clamp by tensors": lambda x: x.clamp_(_values(x, *x.shape) / 4, _values(x, *x.shape) / 2),
    "lerp": lambda x: x.lerp_(_values(x, *x.shape), 0.25),
    "exp of a list": lambda x: torch._foreach_exp_([x]),
    "cumsum": lambda x: x.cumsum_(0),
    "masked_scatter": lambda x: x.masked_scatter_(_values(x, *x.shape) > 4, _values(x, 12)),
    "scatter of a tensor": lambda x: x.scatter_(1, _at(x, 0, 1, 1, 0).view(2, 2), _values(x, 2, 2)),
    "index_copy": lambda x: x.index_copy_(0, _at(x, 1, 0), _values(x, 2, x.shape[1])),
    "index_put of rows in another order": lambda x: x.index_put_((_at(x, 2, 0, 1),), _values(x, 3, x.shape[1]) + 9),
    "addmm": lambda x: x.addmm_(_values(x, x.shape[0], 2), _values(x, 2, x.shape[1])),
    "addmv": lambda x: x[0].addmv_(_values(x, x.shape[1], 2), _values(x, 2), beta=2),
    "baddbmm": lambda x: x[None].baddbmm_(_values(x, 1, x.shape[0], 2), _values(x, 1, 2, x.shape[1])),
    "bmm into out": lambda x: torch.bmm(
        _values(x, 1, x.shape[0], 2), _values(x, 1, 2, x.shape[1]), out=x.expand(1, *x.shape)
    ),
    "mv into out": lambda x: torch.mv(_values(x, x.shape[1], 2), _values(x, 2), out=x[0]),
    "add into out": lambda x: torch.add(_values(x, *x.shape), 1, out=x),
    "columns into out": lambda x: torch.add(_values(x, *x.shape[::-1]).T, 1, out=x),
    "sum into out": lambda x: torch.sum(_values(x, 2, *x.shape), 0, out=x),
    "a larger result into out": lambda x: torch.add(_values(x, 5, 4), 1, out=x),
}
TARGETS: dict[str, Callable[[str], torch.Tensor]] = {
    "column": lambda device: (torch.arange(4.0, device=device) + 1)[:, None].expand(4, 3),
    "row": lambda device: (torch.arange(3.0, device=device) + 1).expand(4, 3),
    "windows": lambda device: torch.arange(6.0, device=device).unfold(0, 3, 1),
    "wide windows": lambda device: torch.arange(6.0, device=device).unfold(0, 4, 1),
    "windows apart": lambda device: torch.arange(10.0, device=device)[1:].unfold(0, 3, 2),
}


def _outcome(write: Write, target: Callable[[str], torch.Tensor], device: str) -> tuple[Any, list[float]]:
    x = target(device)
    before = x.tolist()
    try:
        write(x)
        found = x.tolist()  # fused mode raises here
    except (RuntimeError, IndexError) as error:
        assert x.tolist() == before
        return type(error), []
    return None, found


@pytest.mark.parametrize("target", ["column", "row", "windows"])
@pytest.mark.parametrize("write", WRITES)
def test_written_as_on_the_cpu(write: str, target: str) -> None:
    assert _outcome(WRITES[write], TARGETS[target], "tpu") == _outcome(WRITES[write], TARGETS[target], "cpu")


@pytest.mark.parametrize("target", ["row", "wide windows", "windows apart"])
@pytest.mark.parametrize("write", ORDERED)
def test_written_in_the_order_of_the_cpu(write: str, target: str) -> None:
    known = _outcome(ORDERED[write], TARGETS[target], "cpu")
    # The second time, it is known what does it.
    assert [_outcome(ORDERED[write], TARGETS[target], "tpu") for _ in range(2)] == [known] * 2


def test_who_reads_the_memory_sees_the_write() -> None:
    base = torch.arange(6.0, device="tpu")
    rest, windows = base[4:], base[:4].unfold(0, 3, 1)
    for _ in range(3):
        base += 1
        windows.mul_(2)
    known = torch.arange(6.0)
    for _ in range(3):
        known += 1
        known[:4].unfold(0, 3, 1).mul_(2)
    assert base.tolist() == known.tolist()
    assert rest.tolist() == known[4:].tolist()


def test_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = torch.arange(6.0, device="tpu").unfold(0, 3, 1)
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "warn")
    with pytest.warns(UserWarning, match="add_.* runs on the CPU: elements of a tensor that it writes share memory"):
        windows.add_(1)
    assert metrics.counters()["fallback::aten::add_.Tensor"] == 1
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    before = windows.tolist()
    with pytest.raises(NotImplementedError, match=r"share memory.*clone\(\) the tensor"):
        windows.add_(1)
    assert windows.tolist() == before


def test_a_result_that_needs_more_memory_than_there_is() -> None:
    """Kernels of the CPU write it as if it were contiguous, beyond the end."""
    x = torch.arange(64.0, device="tpu").reshape(1, 1, 4, 4, 4)
    for _ in range(3):
        out = torch.zeros(9, device="tpu")
        torch._C._nn.avg_pool3d(x, 1, out=out[:4].as_strided((1, 1, 4, 4, 4), (0, 0, 0, 0, 1)))
        assert out.tolist() == list(range(9))


REFUSED: dict[str, Write] = {
    "random numbers": lambda x: x.uniform_(),
    "index_add": lambda x: x.index_add_(1, _at(x, 0), _values(x, 4, 1)),
    "put": lambda x: x.put_(_at(x, 0), _values(x, 1)),
    "masked_scatter": lambda x: x.masked_scatter_(x > 1, _values(x, 12)),
    "cumsum": lambda x: x.cumsum_(0),
    "out": lambda x: torch.add(torch.zeros(4, 3, device=x.device), 1, out=x),
    "out of gather": lambda x: torch.gather(x.clone(), 0, torch.zeros_like(x, dtype=torch.int64), out=x),
}


@pytest.mark.parametrize("write", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_refused(write: str, device: str) -> None:
    x = TARGETS["row"](device)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        REFUSED[write](x)
    assert x.tolist() == [[1, 2, 3]] * 4


def test_what_a_mask_leaves_alone_keeps_its_bits() -> None:
    base = torch.tensor([float("nan"), -0.0, 1.0], device="tpu")
    base.expand(2, 3).masked_fill_(torch.tensor([[True, True, False], [False, False, False]], device="tpu"), 0.0)
    assert torch.equal(base.cpu().signbit(), torch.tensor([False, False, False]))
    assert base.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("target", ["column", "row"])
def test_index_out_of_bounds_writes_nothing(target: str) -> None:
    x = TARGETS[target]("tpu")
    before = x.tolist()

    def write() -> None:
        x.index_put_((_at(x, 0, 4),), _values(x, 2, 3))
        x.tolist()  # fused mode raises here

    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
        write()
    assert x.tolist() == before
