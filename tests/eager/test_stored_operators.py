"""Plans of operators that an earlier process left on disk serve calls with other data, and no call that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from torch_tpu import metrics
from torch_tpu.eager import overload_table
from torch_tpu.eager.mode import EagerMode
from torch_tpu.eager.program import plan_table, plan_tracing, stored_plans
from torch_tpu.eager.registration import register
from torch_tpu.ops.tracing import cpu_acceptance
from torch_tpu.runtime.disk_cache import DiskCache
from torch_tpu.runtime.process_client import client

Call = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A new user's disk cache, which takes plans of operators."""
    monkeypatch.setattr(client(), "disk_cache", DiskCache(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(stored_plans, "keeps_operators", True)
    plan_table.clear()
    yield
    plan_table.clear()


def _refuse(call: Any, platform: str | None = None) -> Any:
    raise AssertionError(f"{call.name} is traced")


def as_a_new_process(call: Call, x: torch.Tensor) -> Any:
    """The result of a call whose plans are all on disk."""
    plan_table.clear()
    cpu_acceptance._accepted.clear()
    with mock.patch.object(plan_tracing, "make_plan", _refuse):
        return call(x)


def written(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:].mul_(3)
    x.add_(x.flip(0), alpha=2)
    return x


CALLS: dict[str, Call] = {
    "numbers": lambda x: x * 2.5 + 3,
    "reductions": lambda x: [x.sum(), x.sum(0, dtype=torch.float64), x.amax(1), x.mean((0, 1))],
    "results of several": lambda x: list(torch.sort(x, 1)),
    "views": lambda x: [x[1:, 2:] + 1, x.t() @ x, x.unfold(0, 2, 1).exp()],
    "writes": written,
    "index check": lambda x: x[torch.tensor([0, 2, 1], device=x.device)],
    "factory": lambda x: [torch.full_like(x, 2), torch.arange(5, device=x.device) + 1, x.to(torch.float16)],
    "lists": lambda x: torch._foreach_add([x, x * 2], 1.5),
    "lapack": lambda x: torch.linalg.cholesky(x @ x.T + 9 * torch.eye(3, device=x.device)[:, :3]),
    "out": lambda x: torch.add(x, 1, out=torch.empty(3, 3, device=x.device)),
    "sizes by data": lambda x: torch.nonzero(x > 4),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_data(name: str) -> None:
    call, host = CALLS[name], torch.arange(9.0).reshape(3, 3)
    call(host.to("tpu"))
    other = (host * 1.5 - 2).flip(0).contiguous()
    got, expected = as_a_new_process(call, other.to("tpu")), call(other)
    torch.testing.assert_close(torch.utils._pytree.tree_map(torch.Tensor.cpu, got), expected)
    assert metrics.counters()["stored_plan"] > 0


def test_random_numbers_go_on() -> None:
    def draw(x: torch.Tensor) -> list[float]:
        return [*F.dropout(x, 0.5).flatten().tolist(), *torch.rand(3, device=x.device).tolist()]

    x = torch.ones(3, 3, device="tpu")
    torch.manual_seed(1)
    first, second = draw(x), draw(x)
    torch.manual_seed(1)
    assert as_a_new_process(draw, x) == first
    assert as_a_new_process(draw, x) == second != first


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (lambda x: x.sum(), lambda x: x.sum(dtype=torch.float64)),
        (lambda x: x + 1, lambda x: x + 1.5),
        (lambda x: x.clone(), lambda x: x.clone(memory_format=torch.channels_last)),
        (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: torch.full((2,), 1, device=x.device), lambda x: torch.full((2,), 1.0, device=x.device)),
        (lambda x: x.sqrt(), lambda x: x.permute(0, 2, 3, 1).sqrt()),
        (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
    ],
)
def test_calls_that_differ(call: Call, other: Call) -> None:
    """In an argument, its kind, a dtype or a layout."""
    host = torch.rand(2, 3, 4, 5)
    for function in (call, other, call):
        plan_table.clear()
        got, expected = function(host.to("tpu")), function(host)
        assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(got.cpu(), expected)


def test_settings_that_programs_depend_on() -> None:
    x = torch.ones(2, 2, device="tpu")

    def double() -> torch.dtype:
        plan_table.clear()
        return (torch.ones(2, dtype=torch.int64, device="tpu") / 2).dtype

    assert double() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert double() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert as_a_new_process(lambda x: x @ x, x @ x).tolist() == [[8.0, 8.0], [8.0, 8.0]]
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(AssertionError, match="mm is traced"):
            as_a_new_process(lambda x: x @ x, x)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("known", "wrong"),
    [
        (lambda x: F.huber_loss(x, x * 2, delta=1.0), lambda x: F.huber_loss(x, x * 2, delta=-1.0)),
        (lambda x: torch.add(x.byte(), x.byte(), alpha=5), lambda x: torch.add(x.byte(), x.byte(), alpha=300)),
        (lambda x: F.celu(x, 1.0), lambda x: F.celu(x, 0.0)),
    ],
)
def test_numbers_are_judged_with_a_stored_plan(known: Call, wrong: Call) -> None:
    host = torch.arange(4.0)
    known(host.to("tpu"))
    with pytest.raises(RuntimeError) as expected:
        wrong(host)
    for _ in range(2):
        with pytest.raises(RuntimeError) as got:
            as_a_new_process(wrong, host.to("tpu"))
        assert str(got.value) == str(expected.value)
    torch.testing.assert_close(as_a_new_process(known, host.to("tpu")).cpu(), known(host))


def test_warnings_come_with_a_stored_plan() -> None:
    cpu_acceptance._accepted.clear()
    x = torch.ones(1, device="tpu")
    for call in (torch.std, lambda x: as_a_new_process(torch.std, x)):
        with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
            call(x)


def test_an_index_check_of_a_stored_plan() -> None:
    def take(index: torch.Tensor) -> torch.Tensor:
        return torch.arange(3.0, device="tpu")[index]

    take(torch.tensor([0, 1], device="tpu"))
    with pytest.raises(IndexError, match="out of bounds"):
        as_a_new_process(take, torch.tensor([0, 7], device="tpu")).cpu()


def test_in_fused_mode() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE):
            return (x * 2 + 1).sum()

    run(torch.ones(3, device="tpu")).item()
    assert as_a_new_process(run, torch.full((3,), 2.0, device="tpu")).item() == 15


def test_the_table_says_what_the_lowerings_say() -> None:
    """Written and read again, it has a row for each overload, equal to one found anew."""
    register.install()
    rows, index = overload_table._parse(overload_table._dump(overload_table.rows(), overload_table.registry.index()))
    assert rows == overload_table.rows()
    for name in (
        "aten::add.Tensor",
        "aten::huber_loss",
        "aten::_foreach_add_.Scalar",
        "aten::sum.IntList_out",
        "tpu::range",
    ):
        assert rows[name] == overload_table.row_of(name, overload_table.overload(name)), name
    assert rows["aten::add.Tensor"] == ("program", "", False, (True, True, True), False, False)
    assert rows["aten::add.out"][:2] == ("out", "aten::add.Tensor")
    assert rows["aten::_foreach_add_.Scalar"].is_list
    assert rows["aten::huber_loss"].data is None  # a number that is refused is part of the program
    assert index["add.Tensor"] == "elementwise"
    assert index["sort.stable"] == "sorting"
    assert set(index.values()) <= {*overload_table.families.FAMILIES}
