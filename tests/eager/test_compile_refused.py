"""Fused eager where the compiler has no code for an operator: it runs on the CPU, and the rest stays fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from torch_tpu import hooks, metrics
from torch_tpu.eager.deferred import segment
from torch_tpu.eager.program.plan import Plan
from torch_tpu.runtime.client import Executable, client_errors

# Operators of which the tests pretend that there is no code.
REFUSED = (
    "asinh",
    "frac_",
    "sort",
    "expm1",
    "_native_batch_norm_legit",
    "remainder",
    "index_add_",
    "_foreach_expm1_",
    "add_",
    "bernoulli",
    "conj_physical",
)


@pytest.fixture(autouse=True)
def _refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler without code for some operators, and no plan that was made while it had some."""
    error = client_errors()
    monkeypatch.setattr(error, "__module__", "jax.errors")  # where it is once somebody has imported jax
    compiled, find = Plan.compiled, segment.find

    def without_code(plan: Plan) -> Executable:
        if plan.name in REFUSED:
            raise error(f"UNIMPLEMENTED: no code for {plan.name}\nmore")
        return compiled(plan)

    def whole(code: object, outputs: object, plans: Sequence[Plan], places: object) -> segment.Segment:
        for plan in plans:
            if plan.name in REFUSED:
                raise error(f"UNIMPLEMENTED: no code for {plan.name}\nmore")
        return find(code, outputs, plans, places)

    hooks.forget_programs()
    monkeypatch.setattr(Plan, "compiled", without_code)
    monkeypatch.setattr(segment, "find", whole)
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        yield
    hooks.forget_programs()


def counted(name: str) -> float:
    return metrics.counters().get(name, 0)


def test_the_first_call_runs_on_the_cpu_as_later_ones_do():
    x = torch.linspace(0.1, 2, 7)
    on_device = x.to("tpu")
    torch.tpu.synchronize()
    line = test_the_first_call_runs_on_the_cpu_as_later_ones_do.__code__.co_firstlineno + 6
    for _ in range(3):
        y = (on_device + 1).asinh() * 2  # the line
        y.frac_()
        torch.testing.assert_close(y.cpu(), ((x + 1).asinh() * 2).frac())
    assert counted("fallback::aten::asinh") == 3
    assert counted("fused_failure") == 0
    fallbacks = [f for f in metrics.snapshot()["fallbacks"] if f["what"] == "aten::asinh"]
    assert [(f["line"], f["count"]) for f in fallbacks] == [(f"{__file__}:{line}", 3)]
    assert fallbacks[0]["detail"] == "the compiler refused it: UNIMPLEMENTED: no code for asinh"


def test_views_writes_and_what_was_read_before():
    def run(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0).reshape(2, 3, 4).to(device) / 7
        before, row = x.clone(), x[1].t()
        row[1:3, ::2].add_(row[:2, 1:2], alpha=0.5)  # through a view, of a view, with a number
        kept = row * 2
        x[0, 1:].frac_()
        values, order = torch.sort(x.transpose(0, 2), dim=1, descending=True)
        grown = before.expm1()[:, None, 1]
        x.add_(1)
        return [x, before, row, kept, values, order, grown]

    for got, want in zip(run("tpu"), run("cpu"), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got.cpu(), want)


def test_each_slice_is_its_own():
    """The place of a slice is data, so calls with other places share the plan."""
    x = torch.arange(12.0).reshape(3, 4)
    on_device = x.to("tpu")
    got = [on_device[i, i:3].expm1() for i in range(2)] + [on_device[i + 1, i + 1 : i + 3].asinh() for i in range(2)]
    want = [x[i, i:3].expm1() for i in range(2)] + [x[i + 1, i + 1 : i + 3].asinh() for i in range(2)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_gradients_and_statistics():
    def run(device: str) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).to(device).requires_grad_()
        norm = torch.nn.BatchNorm1d(3).to(device)
        y = norm((x * 3).expm1())
        y = torch.sort(y.asinh(), dim=2)[0]
        weights = torch.linspace(0, 1, 24).reshape(2, 3, 4).to(device)
        (y * weights).sum().backward()
        return [t.detach().cpu() for t in (y, x.grad, norm.weight.grad, norm.running_mean, norm.running_var)]

    for got, want in zip(run("tpu"), run("cpu"), strict=True):
        torch.testing.assert_close(got, want)


def test_lists_complex_numbers_and_numbers_on_the_host():
    def run(device: str) -> list[torch.Tensor]:
        many = [torch.full((n,), n / 4).to(device) for n in (1, 2, 2, 3)]
        torch._foreach_expm1_(many)
        z = torch.tensor([1 + 2j, 3 - 1j]).to(device)
        a = z.conj().conj_physical() + z.conj()
        b = torch.arange(-3, 4).to(device).remainder(torch.tensor(3))
        b.add_(2)
        return [t.cpu() for t in (*many, a, b)]

    for got, want in zip(run("tpu"), run("cpu"), strict=True):
        torch.testing.assert_close(got, want)


def test_random_numbers_of_the_others_stay():
    def draw(refused: bool) -> list[float]:
        torch.manual_seed(5)
        a = torch.rand(3, device="tpu")
        x = a.expm1() if refused else a.exp() - 1
        return [*(x + torch.rand(3, device="tpu")).tolist()]

    assert draw(True) == pytest.approx(draw(False), rel=1e-5)


def test_under_another_default_device():
    """What the CPU is to compute on is made on the host, whatever the user's default is."""
    x = torch.linspace(0.1, 2, 7)
    on_device = x.to("tpu")
    with torch.device("tpu"):
        y = on_device[2:].asinh()
        torch.tpu.synchronize()
    torch.testing.assert_close(y.cpu(), x[2:].asinh())


def test_memory_is_reused_all_the_same():
    x = torch.ones(1000, device="tpu")
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    for _ in range(3):
        x.mul_(2)
        x.frac_()
        x.sub_(1)
    assert x.tolist() == [-1.0] * 1000
    assert torch.tpu.memory_allocated() == before


def test_what_the_cpu_refuses_names_the_line_that_recorded_it():
    x = torch.zeros(3, 2, device="tpu")
    good = x + 1
    line = test_what_the_cpu_refuses_names_the_line_that_recorded_it.__code__.co_firstlineno + 4
    x.index_add_(0, torch.tensor([0, 9], device="tpu"), torch.ones(2, 2, device="tpu"))
    with pytest.raises(
        (IndexError, RuntimeError), match=rf"in index_add_, called at .*test_compile_refused\.py:{line}\)"
    ):
        good.tolist()
    assert good.tolist() == [[1.0, 1.0]] * 3
    assert x.tolist() == [[0.0, 0.0]] * 3


def test_where_the_fallback_is_forbidden_operator_and_line_are_named(monkeypatch):
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    x = torch.linspace(0.1, 2, 7, device="tpu")
    line = test_where_the_fallback_is_forbidden_operator_and_line_are_named.__code__.co_firstlineno + 4
    y, other = x.asinh(), x * 2
    with pytest.raises(
        NotImplementedError, match=rf"aten::asinh .*test_compile_refused\.py:{line}\).* no code for asinh"
    ):
        y.tolist()
    assert other.shape == (7,)
    assert other.tolist() == (torch.linspace(0.1, 2, 7) * 2).tolist()
    assert counted("fallback::aten::asinh") == 0
