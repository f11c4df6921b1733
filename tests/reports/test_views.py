"""Reports about views, strides, `.data`, `out=` and buffers written in place."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tools.compare import assert_same, check


def test_data_takes_another_shape() -> None:
    """Storage identity confused with shape: pytorch/xla#3330, pytorch/xla#3502."""
    x = torch.arange(9.0, device="tpu")
    x.data = x.data[2:5]
    assert x.shape == (3,)
    assert x.tolist() == [2, 3, 4]

    weight = torch.nn.Parameter(torch.full((3, 5), 2.0, device="tpu"))
    kept = weight.data
    weight.data = torch.empty(0, device="tpu")
    assert weight.numel() == 0
    weight.data = kept
    (weight.sum() * 3).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[3.0] * 5] * 3

    y = torch.zeros(6, device="tpu")
    alias = y.view(-1)
    y.data = alias[:2] + 4
    assert alias.tolist() == [0] * 6
    assert y.tolist() == [4, 4]


def test_a_strided_tensor_without_dimensions():
    x = torch.empty_strided((), (), device="tpu").fill_(3)
    assert (x.shape, x.stride(), x.item()) == (torch.Size([]), (), 3.0)


def test_strides_are_those_asked_for() -> None:
    """Layout lost on the way to the device: pytorch/xla#881, pytorch/xla#5239."""
    column_major = torch.empty_strided((3, 4), (1, 3), device="tpu")
    column_major.fill_(2)
    assert column_major.stride() == (1, 3)
    assert column_major.sum().item() == 24

    def layouts(x: torch.Tensor) -> Any:
        nhwc = x.contiguous(memory_format=torch.channels_last)
        permuted = x.permute(3, 1, 0, 2)
        shown = [nhwc, torch.zeros_like(nhwc), nhwc + 1, permuted, permuted.contiguous(), x.expand(2, *x.shape)]
        flags = [nhwc.is_contiguous(memory_format=torch.channels_last), permuted.contiguous().is_contiguous()]
        return [t.stride() for t in shown], flags, nhwc

    check(layouts, torch.randn(2, 3, 4, 5))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch.ones(2, 3, 4, device="tpu").transpose(1, 2).view(2, -1)


def test_out_keeps_its_identity() -> None:
    """A result rebound instead of written: pytorch/xla#2288, pytorch/xla#3330."""
    x = torch.arange(8.0, device="tpu").reshape(2, 4)
    out = torch.empty(0, device="tpu")
    assert torch.mm(x, x.t(), out=out) is out
    assert out.tolist() == [[14, 38], [38, 126]]

    def into_views(x: torch.Tensor) -> Any:
        rows, columns = x.new_zeros(4, 4), x.new_empty(4, 2)
        torch.add(x, 1, out=rows[1:3])
        torch.mul(x, 2, out=columns.t())
        values, indices = x.new_empty(0), x.new_empty(0, dtype=torch.long)
        torch.max(x, 1, out=(values, indices))
        grown = x.new_zeros(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.sum(x, 1, out=grown)
        return rows, columns, values, indices, grown

    check(into_views, torch.randn(2, 4))
    with pytest.warns(UserWarning, match="was resized"):
        torch.sum(x, 1, out=torch.zeros(1, device="tpu"))
    counts = torch.ones(2, 4, dtype=torch.int64, device="tpu")
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Long"):
        torch.add(x, 0.5, out=counts)
    assert counts.sum().item() == 8


def test_in_place_shapes() -> None:
    """Broadcast and overlap of a written tensor: pytorch/xla#2288, pytorch/xla#3330."""

    def run(x: torch.Tensor, row: torch.Tensor) -> Any:
        x += row
        line = row.clone()
        line[1:] = line[:-1].clone()
        row[:] = row.flip(0)
        return line

    check(run, torch.randn(2, 4), torch.randn(4))
    one = torch.ones(1, device="tpu")
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        one.expand(3).add_(1)
    assert one.item() == 1


class Cache(torch.nn.Module):
    """Writes its buffers and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.rows[at] = x
        self.calls += 1
        x.mul_(3)
        return self.rows + 0


def test_compiled_module_writes_its_buffers() -> None:
    """Writes lost by a compiled graph, or a replaced buffer unseen: pytorch/pytorch#115774, optimum-tpu#6."""
    results = []
    for device in ("tpu", "cpu"):
        module = Cache().to(device)
        compiled = torch.compile(module, backend="aot_eager")
        x = torch.tensor([2.0], device=device)
        seen = [compiled(x, torch.tensor([i], device=device)).tolist() for i in (0, 2)]
        state = [x.tolist(), module.rows.tolist(), module.calls.item()]
        module.rows = torch.zeros(3, device=device)
        seen.append(compiled(x, torch.tensor([1], device=device)).tolist())
        results.append((seen, state))
    assert results[0] == results[1]
    assert results[1][1] == [[18.0], [2.0, 0.0, 6.0], 2]


def test_compiled_function_writes_through_an_input_view() -> None:
    """A write to a view of an input lost by a compiled graph: pytorch/pytorch#115774."""

    @torch.compile(backend="aot_eager")
    def every_other(view: torch.Tensor) -> torch.Tensor:
        view[::2] += 1
        return view.sum()

    base = torch.zeros(7, device="tpu")
    assert every_other(base[1:6]).item() == 3
    assert base.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_gradient_of_pieces_of_a_view() -> None:
    """Second gradient through split(view): pytorch/xla#2576."""

    def run(x: torch.Tensor) -> Any:
        first, second = torch.split((x**3).view(-1), [1, 3])
        (grad,) = torch.autograd.grad((first, second), x, [torch.ones_like(first), second * 0 + 2], create_graph=True)
        left, _, right, _ = x.unbind(1)
        return grad, left * right

    x = torch.tensor([[2.0, -1.0, 0.5, 3.0]], requires_grad=True)
    check(run, x)
    on_device = x.detach().to("tpu").requires_grad_()
    (first,) = torch.autograd.grad((on_device**3).view(-1).split([1, 3])[1].sum(), on_device, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), on_device)
    assert_same(second, torch.tensor([[0.0, -6.0, 3.0, 18.0]]))
