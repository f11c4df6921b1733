"""Equal layers that are computed again in backward are handled once too; they still save memory."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compile.test_layers import IDS, _any_size, equals_cpu, layered, train  # noqa: F401
from tests.compile.test_outline import Layer, Model, captured, outlined
from torch_tpu import hooks
from torch_tpu.compile.layers import layered_program, outline, repetition
from torch_tpu.compile.layers.differentiate import OutlinedPart
from torch_tpu.compile.program.graph_program import GraphProgram
from torch_tpu.ops.checkpoint import after

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class Checkpointed(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril().bool()
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        return self.head(x)


def region_of(model: nn.Module) -> tuple[torch.fx.GraphModule, OutlinedPart]:
    """Dynamo's graph with the equal parts taken out, and what they are."""
    found, region = outline.outline(captured(model, IDS.to("tpu")))
    assert region is not None
    return found, region


def count(module: torch.fx.GraphModule | None, target: Any) -> int:
    assert module is not None
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_a_graph_before_and_after() -> None:
    """A layer's backward graph computes the layer again, from its inputs, when the gradient is there."""
    model = Checkpointed(5).to("tpu")
    assert count(captured(model, IDS.to("tpu")), CHECKPOINT) == 5
    found, region = region_of(model)
    assert count(found, CHECKPOINT) == 0
    assert count(found, torch.ops.torch_tpu.region.default) == 5
    made = [region.forward.graph.output_node().args[0][~place] for place in region.saved if place < 0]
    assert [n.meta["val"].nbytes for n in made] == [16]  # besides inputs, the random state
    (waiting,) = region.backward.graph.find_nodes(op="call_function", target=after)
    assert [gate.name for gate in waiting.args[1]] == ["tangents_1"]
    _, plain = region_of(Model(5).to("tpu"))
    product = torch.ops.aten.addmm.default
    assert count(region.forward, product) == count(plain.forward, product) == 2
    assert count(plain.backward, product) == 0 < count(region.backward, product)


def test_programs_and_values() -> None:
    torch.manual_seed(0)
    assert equals_cpu(Checkpointed(11), IDS) == [(11, 3)] * 2


def test_sharing_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    host, results = Checkpointed(8), []
    for least in (99, 4):
        monkeypatch.setattr(repetition, "LEAST_COPIES", least)
        torch.compiler.reset()
        model = copy.deepcopy(host).to("tpu")
        value = train(torch.compile(model), IDS.to("tpu"))
        results.append([value.tolist(), *(p.grad.tolist() for p in model.parameters())])
    assert [depth for depth, _ in layered()[-4:]] == [0, 0, 8, 8]
    assert results[1] == results[0]


@pytest.mark.parametrize("depth", [5, 8])
def test_random_numbers_are_those_of_eager(depth: int) -> None:
    """With a program for everything and with one for the layers; the random state stays on the device."""
    model, ids, results = Checkpointed(depth, dropout=0.5).to("tpu"), IDS.to("tpu"), []
    programs: list[GraphProgram] = []
    before = outlined()
    hooks.graph_program_made = lambda program, plan: programs.append(program)
    try:
        for function in (model, torch.compile(model)):
            torch.manual_seed(7)
            model.zero_grad()
            value = train(function, ids)
            results.append([value, torch.rand(2, device="tpu"), *(p.grad.clone() for p in model.parameters())])
    finally:
        hooks.graph_program_made = None
    assert outlined() - before == depth
    assert len(programs) == (2 if depth == 5 else 6)
    assert not any(program.border for program in programs)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_memory_still_falls() -> None:
    """What a step holds at most, layers launched one by one: without checkpointing and with it."""
    ids, found = torch.zeros(64, 32, dtype=torch.long, device="tpu"), []
    for kind in (Model, Checkpointed):
        torch.compiler.reset()
        model = kind(8).to("tpu")
        step = torch.compile(model)
        train(step, ids)
        model.zero_grad()
        torch.tpu.synchronize()
        before = torch.tpu.memory_allocated()
        torch.tpu.reset_peak_memory_stats()
        train(step, ids)
        torch.tpu.synchronize()
        found.append(torch.tpu.max_memory_allocated() - before)
    assert layered()[-4:] == [(8, 3)] * 4
    assert found[1] < 0.4 * found[0]


def test_parts_of_one_program_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is not computed again before the gradients of the one behind it are there, those of weights too."""
    monkeypatch.setattr(layered_program, "LEAST_LAYERS", 99)
    programs: list[GraphProgram] = []
    hooks.graph_program_made = lambda program, plan: programs.append(program)
    try:
        equals_cpu(Checkpointed(5), IDS)
    finally:
        hooks.graph_program_made = None
    calls = [n for n in programs[1].graph.graph.nodes if outline.is_call(n)]
    assert len(calls) == 5
    for earlier, later in itertools.pairwise(calls):
        waiting = later.args[-1]
        assert waiting.target is after
        assert {n.args[0] for n in (waiting.args[0], *waiting.args[1])} == {earlier}
        assert len(waiting.args[1]) == 6  # of a layer's parameters


def policy(keep: Any, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is keep else CheckpointPolicy.PREFER_RECOMPUTE


def test_layers_may_keep_some_values() -> None:
    """Selective checkpointing: one that keeps other values is another layer."""
    contexts = [
        partial(create_selective_checkpoint_contexts, partial(policy, operator))
        for operator in (torch.ops.aten.addmm.default, torch.ops.aten.gelu.default)
    ]
    torch.manual_seed(0)
    for other in (0, 1):

        class Choosing(Layer):
            number = 0

            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                chosen = contexts[self.number]
                return checkpoint(super().forward, x, mask, use_reentrant=False, context_fn=chosen)

        model = Model(9)
        model.layers = nn.ModuleList(Choosing() for _ in range(9))
        model.layers[0].number = other
        device = copy.deepcopy(model).to("tpu")
        torch.compiler.reset()
        train(torch.compile(device), IDS.to("tpu"))
        train(model, IDS)
        for p, q in zip(model.parameters(), device.parameters(), strict=True):
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)
        assert [depth for depth, _ in layered()[-2:]] == [9 - other] * 2


def test_bodies_with_unequal_numbers_are_unequal() -> None:
    def function(x: Tensor, scales: list[float]) -> Tensor:
        for scale in scales:
            x = checkpoint(lambda x, scale=scale: F.gelu((x * scale).sin().exp()).tanh() + x, x, use_reentrant=False)
        return x

    x = torch.ones(3, device="tpu", requires_grad=True)
    assert repetition.repeated(captured(function, x, [0.5, 0.25, 0.125, 2.0, 3.0]).graph) == []
    torch.compiler.reset()
    assert len(repetition.repeated(captured(function, x, [0.5] * 5).graph)) == 5
