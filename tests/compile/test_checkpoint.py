"""Activation checkpointing in compiled functions: less memory, the same gradients, the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.compile.programs import by_operator, compiled, plans_of
from torch_tpu.compile.program.recompute import delay_recomputation
from torch_tpu.ops.checkpoint import after

WIDTH, ROWS, LAYERS = 64, 512, 8


def layers(dropout: float = 0.3) -> list[nn.Module]:
    torch.manual_seed(0)
    middle = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)]
    return [nn.Sequential(*middle).to("tpu") for _ in range(LAYERS)]


def results(function: Callable[..., Tensor], blocks: list[nn.Module], checkpointed: bool) -> list[Tensor]:
    """The output and all gradients, each drawn from the same seed."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    x = x.to("tpu", next(blocks[0].parameters()).dtype).requires_grad_()
    for block in blocks:
        block.zero_grad()
    torch.manual_seed(7)
    y = function(x, blocks, checkpointed)
    y.square().sum().backward()
    return [y.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for b in blocks for p in b.parameters())]


def network(x: Tensor, blocks: list[nn.Module], checkpointed: bool) -> Tensor:
    for block in blocks:
        x = x + (checkpoint(block, x, use_reentrant=False) if checkpointed else block(x))
    return x


def test_dropout_is_recomputed_with_the_same_mask() -> None:
    # In double precision, so that rounding, which differs from program to program, is no matter.
    blocks = [block.double() for block in layers()]
    want, before = results(network, blocks, False), by_operator()
    got = results(compiled(network), blocks, True)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert by_operator() == before
    # The generator has advanced by what eager draws.
    after_compiled = torch.rand(3, device="tpu")
    results(network, blocks, True)
    assert torch.rand(3, device="tpu").tolist() == after_compiled.tolist()


def test_graphs_that_run_by_operator_recompute_the_same_mask() -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(x @ w), 0.5)

    def function(x: Tensor, w: Tensor, checkpointed: bool) -> Tensor:
        y = checkpoint(noisy, x, w, use_reentrant=False) if checkpointed else noisy(x, w)
        # How many numbers this draws depends on data, which no program can say.
        return torch.cond(x.sum() > 0, torch.rand_like, lambda y: torch.rand_like(y) + torch.rand_like(y), (y,)) + y

    found, before = [], by_operator()
    for checkpointed in (False, True):
        x, w = (torch.ones(4, 4, device="tpu", requires_grad=True) for _ in range(2))
        torch.manual_seed(2)
        compiled(function)(x, w, checkpointed).sum().backward()
        found.append([x.grad.tolist(), w.grad.tolist()])
    torch.testing.assert_close(found[1], found[0])
    assert by_operator() > before


def test_recomputation_saves_memory() -> None:
    """What backward is given, and what it needs besides, together."""
    blocks, needed = layers(), []
    for checkpointed in (False, True):
        forward, backward = plans_of(lambda c=checkpointed: results(compiled(network), blocks, c))[-2:]
        saved = sum(dtype.itemsize * shape.numel() for shape, dtype in ((torch.Size(s), d) for s, d in forward.results))
        needed.append(saved + backward.compiled().analysis().temporary_bytes)
    # XLA:CPU runs independent operations of programs this small at the same time, each with memory of its own; with
    # rows of 2,048 × 256 numbers this is 0.24.
    assert needed[1] < 0.65 * needed[0]


def test_regions_wait_for_their_gradient() -> None:
    """The graph before and after: the recomputed tanh takes its input from `after(input, [gradient])`."""
    graph = torch.fx.Graph()
    x, gradient = graph.placeholder("x"), graph.placeholder("tangents_1")
    recomputed = graph.call_function(torch.ops.aten.tanh.default, (x,))
    incoming = graph.call_function(torch.ops.aten.neg.default, (gradient,))
    graph.output((graph.call_function(torch.ops.aten.tanh_backward.default, (incoming, recomputed)),))
    recomputed.meta["ac_graph_id"] = 0
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    module = torch.fx.GraphModule(nn.Module(), graph)
    before = ["x", "tangents_1", "tanh_default", "neg_default", "tanh_backward_default", "output"]
    assert names(module) == before
    delay_recomputation(module)
    assert names(module) == [*before[:2], "neg_default", "after", "tanh_default", *before[4:]]
    assert recomputed.args[0].target is after
    assert recomputed.args[0].args == (x, [incoming])


def names(module: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes]


def test_checkpoint_of_flex_attention() -> None:
    def attend(x: Tensor) -> Tensor:
        return flex_attention(x, torch.tanh(x), x, score_mod=lambda s, b, h, q, k: s - (q - k).abs())

    found: list[Any] = []
    for checkpointed in (False, True):
        x = torch.randn(1, 2, 150, 8, generator=torch.Generator().manual_seed(0)).to("tpu").requires_grad_()

        def run(x: Tensor, checkpointed: bool = checkpointed) -> Tensor:
            return checkpoint(attend, x, use_reentrant=False) if checkpointed else attend(x)

        before = by_operator()
        compiled(run)(x).square().sum().backward()
        assert by_operator() == before
        found.append(x.grad.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
