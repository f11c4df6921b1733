"""The bucket policy: results are the CPU's whatever is in the padding, and few programs serve many shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.compile.families import FAMILIES, build
from tools.compare import assert_same, no_fallback, to_device
from torch_tpu import metrics
from torch_tpu.compile.buckets import padded_values, rule_table
from torch_tpu.compile.buckets.padded_layout import Unsound
from torch_tpu.compile.buckets.policy import Policy

# The first equals no size that is the same in all calls, or PyTorch would take the two for one.
SIZES = (7, 5, 12)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    metrics.reset()
    # Padding as hostile as can be: NaN spreads through sums and products, such an index is nowhere in bounds.
    monkeypatch.setattr(
        padded_values,
        "filler",
        lambda dtype: float("nan") if dtype.is_floating_point else 1 if dtype is torch.bool else 99,
    )
    yield
    torch.compiler.reset()


def bucketed(function: Any, option: Any = True, **options: Any) -> Any:
    return torch.compile(function, backend="tpu", dynamic=True, options={"buckets": option}, **options)


def programs() -> list[int]:
    """How many programs each graph has that ran since the reset."""
    return [len(graph["programs"]) for graph in metrics.snapshot()["graphs"] if graph["programs"]]


def unpadded() -> str:
    """Why graphs were not padded."""
    return "; ".join(graph["unpadded"] for graph in metrics.snapshot()["graphs"] if graph["unpadded"])


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def indices(*shape: int, below: int = 3) -> torch.Tensor:
    return torch.randint(below, shape)


def check(function: Function, make: Callable[[int], tuple[Any, ...]]) -> None:
    """Compares results and gradients with the CPU at sizes of two buckets."""
    compiled = bucketed(function)
    for size in SIZES:
        host = make(size)
        for t in host:
            if t.is_floating_point():
                t.requires_grad_()
        device = to_device(host)
        with no_fallback():
            want, got = function(*host), compiled(*device)
            assert_same(got, want, rtol=1e-4, atol=1e-5)
            leaves, results = (
                [r for r in tree_leaves(x) if isinstance(r, torch.Tensor) and r.requires_grad] for x in (want, got)
            )
            if leaves:
                seeds = [torch.randn_like(r) for r in leaves]
                torch.autograd.backward(leaves, seeds)
                torch.autograd.backward(results, to_device(seeds))
                for h, d in zip(host, device, strict=True):
                    if h.grad is not None:
                        torch.testing.assert_close(d.grad.cpu(), h.grad, rtol=1e-4, atol=1e-5)


Arguments = Callable[[int], tuple[torch.Tensor, ...]]
GROUPS: dict[str, tuple[Function, Arguments]] = {}


def group(*shapes: Callable[[int], torch.Tensor]) -> Callable[[Function], Function]:
    """Registers a function of tensors of these shapes, for each size of the dimensions that vary."""

    def register(function: Function) -> Function:
        GROUPS[function.__name__] = function, lambda n: tuple(shape(n) for shape in shapes)
        return function

    return register


@group(lambda n: floats(n, 6), lambda n: floats(n, n + 1))
def reductions(x: Any, y: Any) -> Any:
    return (
        (x * 40).exp().sum(0),
        (1 / (x * x + 1)).mean(0),
        y.sum(),
        y.mean(),
        x.prod(0),
        x.amax(0) - x.amin(0),
        *x.max(0),
        x.argmax(0),
        x.argmin(0),
        (x > 2).any(0),
        (x > -2).all(0),
        x.logsumexp(0),
        torch.linalg.vector_norm(x, dim=0),
    )


@group(lambda n: floats(n, 6), lambda n: floats(n, n + 1))
def statistics(x: Any, y: Any) -> Any:
    return x.var(0), x.std(0), x.var(0, correction=0), x.softmax(0), y.log_softmax(-1), x.exp().cumsum(0)


@group(lambda n: floats(n, 6))
def sizes_as_numbers(x: Any) -> Any:
    n = x.shape[0]
    return x * n + x.sum() / (n - 1), x * n**-0.5, torch.arange(1, n + 1, device=x.device)[:, None] * x, (n + 1) // 2


@group(lambda n: floats(n, 6), lambda n: floats(2, n, 6), lambda n: floats(4, 6), lambda n: floats(4))
def products(x: Any, y: Any, w: Any, b: Any) -> Any:
    return x @ x.t() @ x, x.t() @ x, y.transpose(1, 2) @ y, y @ y.transpose(1, 2), F.linear(y, w, b), y @ w[0]


@group(lambda n: floats(n, n + 2, 6), lambda n: floats(2, n, 6))
def views(x: Any, y: Any) -> Any:
    n = x.shape[0]
    return (
        (x.reshape(-1, 6) * 2).sum(1).view(n, -1).sum(1),
        y.view(2, n, 3, 2).transpose(1, 2).reshape(6, n, 2).sum(1),
        (x[:, :1].expand(-1, n, -1) * x[:, :n]).sum((0, 1)),
        y.repeat(1, 1, 2).sum(1),
        y.flatten(1).view(2, n, 6),
        x.permute(2, 0, 1).flip(1).sum(2),
    )


@group(lambda n: floats(n, 6), lambda n: floats(20, 6))
def parts(x: Any, table: Any) -> Any:
    return (
        *(x[1:], x[:-1], x[-2:], x[1:-1].sum(0), x[::2], x[0], x[-1], x[1] * x[-2]),
        (x[1:] - x[:-1]).square().mean(),
        table[: x.shape[0]] * x[:, :1],
        x.split([2, 4], 1)[1].sum(0),
        x.chunk(2, -1)[1].mean(0),
    )


@group(lambda n: floats(n, 6), lambda n: floats(n + 1, 6))
def writes(x: Any, y: Any) -> Any:
    behind, row, last = (y.clone() for _ in range(3))
    behind[1:] = x
    row[:, 2] = x.sum(0).mean()
    last[-3:-1] = x[:2]
    last[-1] = x[-1]
    return behind.cumsum(0), row, last


@group(lambda n: floats(n, 6), lambda n: floats(n + 2, 6))
def joins(x: Any, y: Any) -> Any:
    return (
        torch.cat([x, y, x[:1]]).cumsum(0),
        torch.cat([x, y[2:]], 1).sum(0),
        torch.stack([x, y[:-2]], 1).sum(0),
        F.pad(x, (0, 0, 1, 2), value=2.0).mean(0),
    )


@group(lambda n: floats(n, n + 1))
def masks(x: Any) -> Any:
    return (
        x.masked_fill(torch.ones_like(x).triu(1).bool(), -1e9).softmax(-1),
        x.tril().sum(0),
        torch.where(x > 0, x, x.new_zeros(())).sum(0),
        torch.full((x.shape[0], x.shape[0]), 2.0, device=x.device) @ x,
    )


@group(
    lambda n: floats(n, 6),
    lambda n: floats(3, 4),
    lambda n: indices(n, n + 1),
    lambda n: indices(n, 2),
    lambda n: indices(n),
    lambda n: indices(n, 6),
)
def elements_by_index(x: Any, w: Any, i: Any, j: Any, k: Any, m: Any) -> Any:
    return (
        F.embedding(i, w).sum(0),
        x.gather(1, j).sum(0),
        x.gather(0, m),
        w.index_select(0, k),
        x[k] + x[-k - 1],
        x[k, k].sum(),
        x.new_zeros(4, 6).scatter_add(0, m, x),
    )


@group(lambda n: floats(n, n + 1, 6), lambda n: floats(n, 6), lambda n: floats(n, 6), lambda n: indices(n, n + 1))
def losses(s: Any, x: Any, y: Any, t: Any) -> Any:
    return (
        F.cross_entropy(x, t[:, 0]),
        F.cross_entropy(x, t[:, 0], reduction="none"),
        F.cross_entropy(s[:, :-1].reshape(-1, 6), t[:, 1:].reshape(-1), ignore_index=1),
        F.mse_loss(x, y),
        F.smooth_l1_loss(x, y, reduction="sum"),
        F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    )


@group(
    lambda n: floats(n, n, 6),
    lambda n: floats(6),
    lambda n: floats(6),
    lambda n: floats(n, 6, 2),
    lambda n: floats(n, 6),
)
def rows(x: Any, w: Any, b: Any, y: Any, z: Any) -> Any:
    return (
        F.layer_norm(x, (6,), w, b),
        F.rms_norm(x, (6,), w),
        F.group_norm(y, 2, w, b),
        F.batch_norm(y, b.detach(), w.detach().exp(), w, b),
        z.topk(2, -1).values.sum(0),
        z.sort(-1).values.sum(0),
    )


@group(
    *(lambda n: floats(n, 2, 4, 4), lambda n: floats(3, 2, 3, 3), lambda n: floats(3)),
    *(lambda n: floats(2, 2, n), lambda n: floats(3, 2, 3)),
)
def convolutions(x: Any, w: Any, b: Any, y: Any, v: Any) -> Any:
    return F.conv2d(x, w, b, padding=1), F.conv1d(y, v, padding=2, stride=2), F.max_pool2d(x, 2)


@group(
    *(lambda n: floats(2, 2, n, 4), lambda n: floats(2, 2, n + 1, 4), lambda n: floats(2, 2, n + 1, 4)),
    *(lambda n: floats(2, 1, n, n + 1), lambda n: floats(n, 2, 3, 4)),
)
def attention(q: Any, k: Any, v: Any, mask: Any, batch: Any) -> Any:
    attend = F.scaled_dot_product_attention
    visible = torch.ones(q.shape[2], k.shape[2], device=q.device).tril().bool()
    return (
        attend(q, k, v),
        attend(q, q * 2, q + 1, is_causal=True),
        attend(q, k, v, mask),
        attend(q, k, v, visible),
        attend(batch, batch, batch),
    )


@pytest.mark.parametrize("name", GROUPS)
def test_equals_cpu_whatever_is_in_the_padding(name: str) -> None:
    check(*GROUPS[name])
    assert not unpadded()
    # One for the first size, one for each bucket.
    assert max(programs()) == len(SIZES)


class Model(nn.Module):
    """A causal language model of two layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.words, self.places, self.head = nn.Embedding(19, 16), nn.Embedding(70, 16), nn.Linear(16, 19)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(n, device=ids.device))
        mask = torch.full((n, n), float("-inf"), device=ids.device).triu(1)
        return self.head(self.layers(x, mask=mask, is_causal=True))


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].reshape(-1, 19), ids[:, 1:].reshape(-1))


def test_training_on_sequences_of_any_length_and_a_shorter_last_batch() -> None:
    host = Model()
    device = copy.deepcopy(host).to("tpu")
    step = bucketed(loss)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (host, device)]
    for batch, length in ((5, 23), (5, 14), (5, 29), (3, 11), (5, 31), (2, 9)):
        ids = indices(batch, length, below=19)
        want, got = loss(host, ids), step(device, ids.to("tpu"))
        want.backward()
        got.backward()
        torch.testing.assert_close(got.cpu(), want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for h, d in zip(host.parameters(), device.parameters(), strict=True):
            torch.testing.assert_close(d.cpu(), h)
    assert not unpadded()
    # The first call; 5 × 16 and 5 × 32 while only lengths varied; 8 × 16 and 8 × 32.
    assert programs() == [5, 5]


def test_convolutions_with_batch_statistics() -> None:
    host = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    )
    device = copy.deepcopy(host).to("tpu")
    run = bucketed(lambda model, x: model(x).square().mean())
    for batch in (13, 6, 15):
        x = floats(batch, 3, 8, 8)
        want, got = host(x).square().mean(), run(device, x.to("tpu"))
        want.backward()
        got.backward()
        torch.testing.assert_close(got.cpu(), want)
    for h, d in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(d.grad.cpu(), h.grad)
    for h, d in zip(host.buffers(), device.buffers(), strict=True):
        torch.testing.assert_close(d.cpu(), h)
    assert not unpadded()


def test_random_numbers_are_those_of_the_unpadded_run() -> None:
    model = Model(dropout=0.3).to("tpu").train()
    exact = torch.compile(loss, backend="tpu", dynamic=True)
    padded = bucketed(loss)
    for length in (14, 9):
        ids = indices(3, length, below=19).to("tpu")
        seen = []
        for run in (exact, padded):
            torch.manual_seed(7)
            model.zero_grad()
            result = run(model, ids)
            result.backward()
            seen.append([result.cpu(), torch.rand(3, device="tpu").cpu(), *(p.grad.cpu() for p in model.parameters())])
        for g, w in zip(seen[1], seen[0], strict=True):
            torch.testing.assert_close(g, w)
    assert not unpadded()


def test_64_lengths_need_as_many_programs_as_there_are_buckets() -> None:
    model = Model().eval()
    device = bucketed(copy.deepcopy(model).to("tpu"))
    with torch.no_grad():
        ids = indices(2, 66, below=19)
        want = model(ids)  # causal: what is behind a place changes nothing there
        for length in range(3, 67):
            got = device(ids[:, :length].to("tpu")).cpu()
            torch.testing.assert_close(got, want[:, :length], rtol=1e-4, atol=1e-5)
    assert programs() == [6]  # of the first length, 8, 16, 32, 64 and 128
    # Arguments are padded and results are cut without a program.
    assert metrics.counters()["program"] == 6


def test_a_cache_that_grows_by_64_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    host, _ = build(FAMILIES["llama"])
    device = copy.deepcopy(host).to("tpu")
    step = bucketed(device)
    caches = [transformers.DynamicCache(config=host.config) for _ in range(2)]
    ids = indices(2, 69, below=60)
    with torch.no_grad():
        for end in range(5, 70):
            new = ids[:, :5] if end == 5 else ids[:, end - 1 : end]
            want, got = (
                run(input_ids=x, past_key_values=cache, use_cache=True).logits
                for run, x, cache in ((host, new, caches[0]), (step, new.to("tpu"), caches[1]))
            )
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    assert not unpadded()
    assert programs() == [1, 6]  # the prompt; the first length, 8, 16, 32, 64 and 128


def test_generate_with_a_growing_cache() -> None:
    host, inputs = build(FAMILIES["llama"])
    host.generation_config.eos_token_id = None
    device = copy.deepcopy(host).to("tpu")
    device.forward = bucketed(device.forward)
    for length, tokens in ((5, 12), (9, 3), (7, 3), (4, 3)):
        prompt = inputs["input_ids"][:, :length]
        want = host.generate(prompt, max_new_tokens=tokens, do_sample=False)
        got = device.generate(prompt.to("tpu"), max_new_tokens=tokens, do_sample=False)
        assert got.tolist() == want.tolist()
    # Prompts and steps: the first length, 8 and 16 of each.
    assert programs() == [3, 3]


def test_what_is_not_sound_has_a_program_for_each_shape() -> None:
    def median(x: torch.Tensor) -> torch.Tensor:
        return x.sort(0).values[x.shape[0] // 2] + x.sum(0)

    compiled = bucketed(median)
    for size in SIZES:
        x = floats(size, 3)
        torch.testing.assert_close(compiled(x.to("tpu")).cpu(), median(x))
    assert programs() == [len(SIZES)]
    assert unpadded() == "aten.sort.default: along a padded dimension"
    assert (
        "can't be padded, so it has a program for each shape: aten.sort.default: along a padded dimension"
        in metrics.report(10**6)
    )


def test_numbers_on_the_host() -> None:
    def scaled(x: torch.Tensor, scale: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor]:
        factor = scale.double() * power
        # Backward needs the factor again; it is a result, too.
        return (x * factor.float() + x.shape[0] * scale).exp().sum(0), factor

    compiled = bucketed(scaled)
    for size, power in zip(SIZES, (0.25, 0.5, 0.125), strict=True):
        x = floats(size, 3).requires_grad_()
        given = x.detach().to("tpu").requires_grad_()
        scale = torch.tensor(0.05 * size)
        (want, factor), (got, own) = scaled(x, scale, power), compiled(given, scale, power)
        assert_same(got, want, rtol=1e-4, atol=1e-5)
        assert own.device.type == "cpu"
        assert own == factor
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(given.grad.cpu(), x.grad)
    assert not unpadded()
    assert max(programs()) == len(SIZES)


def test_tensors_on_the_host() -> None:
    compiled = bucketed(lambda x, y: (x * y.to("tpu", non_blocking=True)).sum(0))
    for size in SIZES:
        x, y = floats(size, 3), floats(size, 3)
        assert_same(compiled(x.to("tpu"), y), (x * y).sum(0), rtol=1e-5, atol=1e-5)
    assert not unpadded()
    assert programs() == [len(SIZES)]


def test_an_index_beyond_the_true_size_raises() -> None:
    compiled = bucketed(lambda x, i: x[i])
    for size in SIZES:
        x = floats(size, 3).to("tpu")
        compiled(x, torch.tensor([0, size - 1, -size]).to("tpu"))
        with pytest.raises(IndexError):
            compiled(x, torch.tensor([0, size, 1]).to("tpu"))


def test_results_are_ordinary_tensors() -> None:
    compiled = bucketed(lambda x: (x + 1, x.t() * 2))
    for size in (7, 5, 11):
        x = floats(size, 3)
        plus, twice = compiled(x.to("tpu"))
        assert_same(plus, x + 1)
        assert_same(plus[1:].sum(0), (x + 1)[1:].sum(0), rtol=1e-5, atol=1e-5)
        assert_same(twice, x.t() * 2)
        plus.mul_(2)
        plus[0] = 5
        want = (x + 1) * 2
        want[0] = 5
        assert_same(plus, want)


def test_results_of_one_graph_go_to_another() -> None:
    first, second = bucketed(lambda x: x.exp()), bucketed(lambda x: x.sum(0))
    for size in (7, 5, 12, 14):
        x = floats(size, 3)
        assert_same(second(first(x.to("tpu"))), x.exp().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "buckets"),
    [(True, [8, 8, 16, 32]), (1.5, [8, 8, 16, 24]), ([4, 20], [4, 20, 20, None])],
    ids=["powers of two", "growth", "sizes"],
)
def test_buckets(option: Any, buckets: list[int | None]) -> None:
    assert [Policy(option).round_up(size) for size in (4, 8, 9, 21)] == buckets
    assert Policy(option).round_up(1) is None


@pytest.mark.parametrize("option", [1.0, 8, "8", [], [1, 8], [8.0], {"least": 8}])
def test_other_options_are_refused(option: Any) -> None:
    with pytest.raises(ValueError, match="'buckets'"):
        Policy(option)


def test_a_fault_in_a_rule_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not become a program for each shape, which nobody would notice."""

    def softmax(ctx: Any, node: Any, values: Any) -> Any:
        return values[0].no_such_method()

    monkeypatch.setitem(rule_table.RULES, "_softmax", softmax)
    compiled = bucketed(lambda x: x.softmax(0))
    compiled(torch.ones(SIZES[0], 3, device="tpu"))  # the first size has a program of its own
    with pytest.raises(RuntimeError, match=r"internal error .*\.softmax for aten\._softmax.*no_such_method"):
        compiled(torch.ones(SIZES[1], 3, device="tpu"))


def test_a_rule_that_does_not_apply_leaves_a_program_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(ctx: Any, node: Any, values: Any) -> Any:
        raise Unsound("on Sundays")

    monkeypatch.setitem(rule_table.RULES, "_softmax", softmax)
    compiled = bucketed(lambda x: x.softmax(0))
    for size in SIZES:
        assert_same(compiled(torch.ones(size, 3, device="tpu")), torch.ones(size, 3).softmax(0))
    assert "aten._softmax.default: on Sundays" in unpadded()
