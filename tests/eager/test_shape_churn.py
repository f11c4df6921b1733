"""Small exact operators of many shapes: the host runs further ones, with what a program would have given."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.compile.families import FAMILIES, build
from tools.random_programs.check import check
from torch_tpu import hooks, metrics
from torch_tpu.eager.host import shape_churn

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "warn")
    monkeypatch.setattr(shape_churn, "_made", Counter())
    hooks.forget_programs()  # shapes that other tests have had would not count
    with torch.tpu.set_eager_mode(request.param):
        yield


def hosted() -> int:
    return sum(count for name, count in metrics.counters().items() if name.startswith("hosted::"))


def programs() -> float:
    return metrics.counters().get("program", 0)


def test_ids_that_grow_need_a_bounded_number_of_programs():
    """Sizes that no other test has: known shapes keep their programs."""
    ids = torch.arange(7003, 7005, dtype=torch.int16)[None]
    on_device, shown = ids.to("tpu"), []
    line = test_ids_that_grow_need_a_bounded_number_of_programs.__code__.co_firstlineno + 6
    for _ in range(3 * shape_churn.MOST_SHAPES):
        on_device = torch.cat([on_device, on_device[:, -1:] + 1], 1)  # the line
        shown.append(programs())
    assert on_device.tolist() == [[*range(7003, 7005 + 3 * shape_churn.MOST_SHAPES)]]
    assert shown[-1] == shown[shape_churn.MOST_SHAPES] <= 2 * shape_churn.MOST_SHAPES
    # Where the last element lies is data, but for the second of two.
    assert metrics.counters()["hosted::cat"] == 2 * shape_churn.MOST_SHAPES
    (event,) = (e for e in metrics.snapshot()["hosted"] if e["what"] == "cat")
    assert (event["line"], event["count"]) == (f"{__file__}:{line}", 2 * shape_churn.MOST_SHAPES)
    assert event["detail"] == f"there are programs for {shape_churn.MOST_SHAPES} shapes; other shapes run on the CPU"
    assert "small operators of many shapes, on the CPU" in metrics.report(10**6)

    before = metrics.counters()["hosted::cat"]
    again = ids.to("tpu")
    for _ in range(shape_churn.MOST_SHAPES):
        again = torch.cat([again, again[:, -1:] + 1], 1)
    assert again.tolist() == [[*range(7003, 7005 + shape_churn.MOST_SHAPES)]]
    assert metrics.counters()["hosted::cat"] == before


def _writes_through_views(n: int, device: str) -> list[torch.Tensor]:
    x = torch.arange(2 * n, dtype=torch.int16).reshape(2, n).to(device)
    kept, column = x.clone(), x.t()[1:, 0]
    column.add_(x[1, 1:])
    x[:, ::2] = 7
    x[1].masked_fill_(x[0] > 5, -1)
    return [x, kept, column]


def _with_out(n: int, device: str) -> list[torch.Tensor]:
    a = torch.arange(n, dtype=torch.int16).to(device)
    out = torch.empty(0, dtype=torch.int16).to(device)
    torch.bitwise_xor(a, a.flip(0), out=out)
    b = torch.ones(n, dtype=torch.int16).to(device)
    torch.add(a, a, alpha=2, out=b)
    return [out, b]


def _reductions(n: int, device: str) -> list[torch.Tensor]:
    x = (torch.arange(3 * n, dtype=torch.int16).reshape(3, n) * 31 % 17).to(device)
    values, places = x.max(1)
    return [x.sum(), x.cumsum(1), values, places, x.amin(0), x.argmin(1), x.eq(3).any(1), (x % 5).clamp(1, 3)]


def _layouts(n: int, device: str) -> list[torch.Tensor]:
    x = torch.arange(4.0 * n, dtype=torch.bfloat16).reshape(2, n, 2).to(device).transpose(0, 1)
    order = torch.arange(n - 1, -1, -1).to(device)
    return [
        torch.stack([x, x], -1),
        torch.nn.functional.pad(x, (1, 0), value=0.5),
        x.index_select(0, order),
        x[order, 1],
        torch.where(x > 3, x, 1.5),
        x.clone(memory_format=torch.contiguous_format),
        x.tril(),
        torch.full((n, 3), 0.25, dtype=torch.float64, device=device),
        torch.zeros_like(x),
        torch.arange(n, 5 * n, 4, dtype=torch.int16, device=device),
        torch.view_as_complex(torch.stack([x.float(), x.float()], -1)).conj().clone(),
    ]


@pytest.mark.parametrize("run", [_writes_through_views, _with_out, _reductions, _layouts])
def test_values_and_layouts_are_those_of_the_cpu(run: Callable[[int, str], list[torch.Tensor]], monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 1)
    for n in (2, 3, 5, 11, 12):
        for got, want in zip(run(n, "tpu"), run(n, "cpu"), strict=True):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), (n, got)
            assert torch.equal(got.cpu(), want)
    assert hosted() > 10


def test_random_programs_do_the_same(monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 0)
    assert [check(seed, torch.tpu.eager_mode.value) for seed in range(300, 304)] == [None] * 4
    assert hosted() > 4


def test_gradients_flow(monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 0)
    x = torch.linspace(0, 1, 35).reshape(5, 7)
    order = torch.tensor([[4, 0, 0], [1, 2, 3]])

    def gradient(device: str) -> torch.Tensor:
        leaf = x.to(device).requires_grad_()
        y = torch.cat([leaf.gather(0, order.to(device)), leaf[:2, 4:].roll(1, 0)], 1)
        (y * y).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"))
    assert hosted() >= 2


def test_mistakes_are_those_of_the_cpu_and_write_nothing(monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 0)
    for call in (
        lambda x: x.index_select(0, torch.tensor([0, 9], device=x.device)),
        lambda x: x.floor_divide_(0),
        lambda x: torch.cat([x, torch.zeros(3, 3, dtype=x.dtype, device=x.device)]),
        lambda x: x + torch.zeros(4, dtype=x.dtype, device=x.device),
    ):
        host, on_device = torch.arange(41, 46, dtype=torch.int16), torch.arange(41, 46, dtype=torch.int16).to("tpu")
        with pytest.raises(Exception) as want:  # noqa: PT011  (the CPU says which)
            call(host)
        with pytest.raises(want.type) as got:
            call(on_device)
        assert str(got.value) == str(want.value)
        assert (on_device.tolist(), on_device._version) == (host.tolist(), host._version)


def test_what_the_host_must_not_run(monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 0)
    monkeypatch.setattr(shape_churn, "LARGEST", 1024)
    x = torch.ones(21).to("tpu")
    i = torch.arange(21).to("tpu")
    large = torch.arange(300).to("tpu")
    torch.tpu.synchronize()
    metrics.reset()
    results = [
        x + 1,  # rounds
        i * 0.5,
        i.float(),
        torch.cat([x, x.double()]),
        x.sum(),
        x == 1,  # small numbers are zero on the device
        large + 1,
        i[:, None] + i,  # 441 numbers
        torch.randint(5, (21,), device="tpu"),
        torch.randperm(21, device="tpu"),
        i.unique(),
    ]
    torch.tpu.synchronize()
    assert len(results) == 11
    assert hosted() == 0
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    before = hosted()
    assert (i + 3).tolist() == [*range(3, 24)]
    assert hosted() == before


def test_a_shape_in_steady_use_gets_its_program(monkeypatch):
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 0)
    monkeypatch.setattr(shape_churn, "CALLS_WORTH_A_PROGRAM", 3)
    x = torch.arange(617 if torch.tpu.eager_mode is EagerMode.DEFER_NEVER else 619, dtype=torch.int16)
    on_device = x.to("tpu")
    results = [(on_device ^ 5).sum().item() for _ in range(6)]
    assert results == [(x ^ 5).sum().item()] * 6
    assert metrics.counters()["hosted::bitwise_xor.Scalar"] == 3


def test_generate_needs_a_bounded_number_of_programs(monkeypatch):
    """Of the compiled model a program for each bucket, of what surrounds it one for each of the first few lengths."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(shape_churn, "MOST_SHAPES", 4)
    torch.compiler.reset()
    model, inputs = build(FAMILIES["llama"])
    model.generation_config.eos_token_id = None
    on_device = copy.deepcopy(model).to("tpu")
    on_device.forward = torch.compile(on_device.forward, backend="tpu", dynamic=True, options={"buckets": True})
    counts: dict[int, float] = {}

    class Counting(transformers.StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
            counted = metrics.counters()
            counts[ids.shape[1]] = counted.get("program", 0) + counted.get("fused_program", 0)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    prompt = inputs["input_ids"][:, :5]
    want = model.generate(prompt, max_new_tokens=20, do_sample=False)
    got = on_device.generate(prompt.to("tpu"), max_new_tokens=20, do_sample=False, stopping_criteria=[Counting()])
    assert got.tolist() == want.tolist()
    assert counts[25] == counts[20]  # the last bucket, of 32, begins at 17
    torch.compiler.reset()
