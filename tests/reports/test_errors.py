"""Reports about errors: the words are PyTorch's, and a failed call leaves every tensor as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

SAME: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "shapes of a sum": lambda a, b: a + b,
    "shapes of a product": lambda a, b: a @ b,
    "shapes of a batched product": lambda a, b: torch.bmm(a[None], b[None]),
    "view": lambda a, b: a.view(7),
    "reshape": lambda a, b: a.reshape(-1, 4),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "bounds of uniform_": lambda a, b: a.uniform_(5, 2),
    "expand": lambda a, b: a.expand(5, 5),
    "dimension of a sum": lambda a, b: a.sum(5),
    "dimension of squeeze": lambda a, b: a.squeeze(9),
    "permute": lambda a, b: a.permute(0, 0),
    "linear": lambda a, b: F.linear(a, torch.ones(1, 4, device=a.device)),
    "item": lambda a, b: a.item(),
    "truth": lambda a, b: bool(a),
    "backward": lambda a, b: a.backward(),
    "index select": lambda a, b: a.index_select(0, torch.tensor([2], device=a.device)),
    "row": lambda a, b: a[torch.tensor([0, 2], device=a.device)],
    "written row": lambda a, b: a.index_fill_(0, torch.tensor([-3], device=a.device), 1.0),
    "gather": lambda a, b: a.gather(1, torch.tensor([[3]], device=a.device)),
    "scatter": lambda a, b: a.scatter_(1, torch.tensor([[3]], device=a.device), 1.0),
    "embedding": lambda a, b: F.embedding(torch.tensor([2], device=a.device), a),
    "float into integers": lambda a, b: a.to(torch.int64).mul_(0.5),
}


@pytest.mark.parametrize("name", SAME)
def test_words_are_those_of_the_cpu(name: str) -> None:
    """Internal failures in place of PyTorch's message: pytorch/xla#9486, pytorch/xla#9635, pytorch/xla#4647."""
    hosts = torch.arange(6.0).reshape(2, 3), torch.ones(4, 5)
    a, b = (t.to("tpu") for t in hosts)
    errors = (RuntimeError, ValueError, IndexError)
    with pytest.raises(errors) as known:
        SAME[name](*(t.clone() for t in hosts))
    with pytest.raises(errors) as raised:
        SAME[name](a, b)
    assert isinstance(raised.value, known.type)
    assert str(raised.value).splitlines()[0] == str(known.value).splitlines()[0]
    assert torch.equal(a.cpu(), hosts[0])
    assert torch.equal(b.cpu(), hosts[1])


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda a, h: a + h,
    "reversed sum": lambda a, h: h + a,
    "in place": lambda a, h: a.add_(h),
    "in place on the host": lambda a, h: h.add_(a),
    "product": lambda a, h: a @ h.t(),
    "cat": lambda a, h: torch.cat([a, h]),
    "where": lambda a, h: torch.where(a > 0, a, h),
    "out on the host": lambda a, h: torch.add(a, 1, out=h),
    "out on the device": lambda a, h: torch.add(h, 1, out=a),
    "linear": lambda a, h: F.linear(h, a),
    "list": lambda a, h: torch._foreach_add_([a], [h]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name: str) -> None:
    """Tensors of two devices in one call: pytorch/xla#9635."""
    a, host = torch.ones(2, 3, device="tpu"), torch.full((2, 3), 2.0)
    with pytest.raises(RuntimeError, match=r"(?s)device.*cpu|cpu.*device"):
        MIXED[name](a, host)
    assert a.tolist() == [[1] * 3] * 2
    assert host.tolist() == [[2] * 3] * 2


def test_host_memory_of_a_device_tensor() -> None:
    """numpy() reads host memory only: pytorch/xla#4647."""
    x = torch.ones(2, device="tpu")
    with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy.*Tensor.cpu\(\)"):
        x.numpy()


def test_device_index_that_is_not_there() -> None:
    """A tensor on a device this process has not got: pytorch/xla#4647."""
    x = torch.ones(2)
    for make in (lambda: torch.ones(2, device="tpu:1"), lambda: x.to("tpu:1"), lambda: torch.arange(3, device="tpu:7")):
        with pytest.raises(RuntimeError, match=r"tpu:[17]|invalid device|device index"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, dtype=torch.complex32, device=d),
        lambda d: torch.zeros(2, dtype=torch.complex32).to(d),
        lambda d: torch.complex(*[torch.zeros(2, dtype=torch.float16, device=d)] * 2),
    ],
)
def test_dtype_that_the_device_has_not(make: Callable[[str], torch.Tensor]) -> None:
    """An unsupported dtype named as such: pytorch/xla#9486."""
    with pytest.raises(TypeError, match=r"tpu device does not support torch\.complex32"):
        make("tpu")


def test_first_line_fits_a_screen() -> None:
    """Stack traces of the compiler in the message: pytorch/xla#9635."""
    with pytest.raises(RuntimeError) as raised:
        torch.ones(300, 3, device="tpu") + torch.ones(301, 3, device="tpu")
    assert len(str(raised.value)) < 600
    assert "Traceback" not in str(raised.value)
