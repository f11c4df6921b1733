"""A program that was made for a view at one place serves the same view at other places of its storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tools.compare import assert_same
from torch_tpu import metrics
from torch_tpu.compile.program.graph_program import GraphProgram

aten = torch.ops.aten
OFFSETS = (40, 7, 0, 23, 40, 61)


def windows(base: torch.Tensor) -> list[torch.Tensor]:
    """The same 4×4 view with gaps between its rows, at several places."""
    return [base.as_strided((4, 4), (5, 1), offset) for offset in OFFSETS]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "trace": torch.trace,
    "diag": torch.diag,
    "diag_embed": torch.diag_embed,
    "diagonal_copy": torch.diagonal_copy,
    "unfold_copy": lambda v: torch.unfold_copy(v, 0, 2, 1),
    "as_strided_copy": lambda v: torch.as_strided_copy(v, (2, 3), (1, 2)),
    "as_strided_copy_absolute": lambda v: torch.as_strided_copy(v, (2, 3), (1, 2), 9),
    "select_copy": lambda v: torch.select_copy(v, 1, 2),
    "split_copy": lambda v: torch.split_copy(v, 3),
    "unbind_copy": torch.unbind_copy,
    "narrow_copy": lambda v: torch.narrow_copy(v, 1, 1, 2),
    "transpose_copy": lambda v: torch.transpose_copy(v, 0, 1),
    "expand_copy": lambda v: torch.expand_copy(v[:, None], (4, 3, 4)),
    "view_as_real_copy": lambda v: torch.view_as_real_copy(torch.complex(v, v)),
    "block_diag": lambda v: torch.block_diag(v, v[:2]),
    "tensor_split": lambda v: [part + 1 for part in v.tensor_split(3)],
    "instance_norm": lambda v: torch.nn.functional.instance_norm(v[None]),
    "glu": torch.nn.functional.glu,
    "pixel_shuffle": lambda v: torch.nn.functional.pixel_shuffle(v[:, None, :], 2) if v.dim() > 3 else v.pow(2),
}


@pytest.mark.parametrize("fused", [False, True], ids=["strict", "fused"])
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, fused: bool) -> None:
    host = torch.arange(1.0, 101.0)
    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    with torch.tpu.set_eager_mode(mode):
        for got, want in zip(windows(host.to("tpu")), windows(host), strict=True):
            assert_same(READS[name](got), READS[name](want))


def graph_of_views(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        v[1:3].sum(1),
        v.select(0, 1) * 2,
        v.diagonal() + 1,
        v.t()[1:] * v[:, 1:].t(),
        v.unfold(1, 2, 1).sum(-1),
        v.contiguous().view(torch.int32)[:, ::2] + 0,
        v.unsqueeze(1).expand(4, 2, 4)[2] - v[2],
    )


def test_compiled_graphs() -> None:
    host = torch.arange(1.0, 101.0)
    compiled = torch.compile(graph_of_views, backend="tpu")
    for got, want in zip(windows(host.to("tpu")), windows(host), strict=True):
        assert_same(compiled(got), graph_of_views(want))


def test_a_batch_that_slides_needs_one_program() -> None:
    data = torch.arange(64.0).view(16, 4)
    on_device = data.to("tpu")
    compiled = torch.compile(lambda b: b.view(2, 2, 4).transpose(0, 1)[:, :, 1:].sum(-1), backend="tpu")
    compiled(on_device[1:5])
    before = metrics.counters()["program"]
    for begin in range(2, 12):
        want = data[begin : begin + 4].view(2, 2, 4).transpose(0, 1)[:, :, 1:].sum(-1)
        assert compiled(on_device[begin : begin + 4]).tolist() == want.tolist()
    assert metrics.counters()["program"] == before


def writing(v: torch.Tensor) -> torch.Tensor:
    v.diagonal().mul_(2)
    v[1:3, ::2].add_(v[0, :2])
    v.t()[3].fill_(7)
    return v[1:, 1]


def test_writes_and_returned_views() -> None:
    compiled = torch.compile(writing, backend="tpu")
    for function in (writing, compiled):
        host = torch.arange(1.0, 101.0)
        base = host.to("tpu")
        for got, want in zip(windows(base), windows(host), strict=True):
            found, expected = function(got), writing(want)
            assert_same(found, expected)
            assert found.storage_offset() == expected.storage_offset()
            found.add_(1)
            expected.add_(1)
            assert_same(base, host)


def test_a_view_beside_the_whole_storage() -> None:
    """The graph writes all of the storage, in another order of dimensions, and reads a view that moves.

    Called without AOTAutograd, whose graphs for such arguments hold the offset of the first call.
    """

    def function(whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        whole.t().copy_(whole * 2)
        return [part[:, 1] * 1]

    host = torch.arange(36.0).view(6, 6)
    base = host.to("tpu")
    program = GraphProgram(make_fx(function, tracing_mode="fake")(host.clone(), host[:2].clone()), "test")
    for row in (1, 3, 2):
        assert_same(program(base, base[row : row + 2]), function(host, host[row : row + 2]))
        assert_same(base, host)


def test_another_dtype() -> None:
    host = torch.arange(64, dtype=torch.int32)
    base = host.to("tpu")
    for offset in (5, 9, 30):
        got, want = (torch.view_copy(b[offset : offset + 6], torch.uint8) for b in (base, host))
        assert_same(got, want)


@pytest.mark.parametrize("absolute", [False, True])
def test_as_strided_in_a_graph(absolute: bool) -> None:
    """Its place counts from the beginning of the storage: each offset has a program."""

    def function(v: torch.Tensor) -> torch.Tensor:
        return v.as_strided((2,), (3,), 11 if absolute else None) + 0

    compiled = torch.compile(function, backend="tpu")
    host = torch.arange(1.0, 101.0)
    for got, want in zip(windows(host.to("tpu")), windows(host), strict=True):
        # Dynamo captures the offset of the first call, so the graph is made anew where it is given.
        torch._dynamo.reset()
        assert_same(compiled(got), function(want))


def test_what_only_looks_at_a_view_has_its_own_memory() -> None:
    def fresh(v: torch.Tensor) -> list[torch.Tensor]:
        made = [v.new_empty_strided(v.shape, v.stride()), torch.empty_like(v), v.new_zeros(3)]
        return [t.fill_(7) for t in made] + [v * 1]

    compiled = torch.compile(fresh, backend="tpu")
    for function in (fresh, compiled):
        host = torch.arange(100.0)
        base = host.to("tpu")
        for got, want in zip(windows(base), windows(host), strict=True):
            assert_same(function(got), fresh(want), strides=False)
            assert_same(base, host)
