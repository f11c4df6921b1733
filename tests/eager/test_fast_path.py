"""The fast path (`eager.dispatch.fast_path`): whatever differs between two calls, each gets its own program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tools.operators import reach
from torch_tpu import metrics
from torch_tpu.eager.dispatch import fast_path
from torch_tpu.eager.dispatch.operator import Operator

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE], ids=["strict", "fused"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    fast_path.fast_path_plans.clear()
    with torch.tpu.set_eager_mode(request.param):
        yield


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def same(call: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Twice: the first call may be the one that is remembered."""
    on_device = [t.to("tpu") for t in tensors]
    for _ in range(2):
        result, expected = call(*on_device), call(*tensors)
        torch.testing.assert_close(result.cpu(), expected)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())


def test_a_second_call_is_recognised():
    x = numbers(3, 4).to("tpu")
    first = x * 2.0
    assert len(fast_path.fast_path_plans) == 1
    before = metrics.counters().get("program", 0)
    again = x * 3.0
    assert metrics.counters().get("program", 0) == before
    assert len(fast_path.fast_path_plans) == 1
    assert (again - first).cpu().equal(numbers(3, 4))


def test_numbers_of_other_types():
    for number in (2, 2.0, -3, True, 2**40, 1 + 2j):
        same(lambda x, n=number: x * n, numbers(3))
        same(lambda x, n=number: x * n, torch.tensor([1, 2, 3]))


def test_integers_and_numbers_that_all_of_them_have():
    """Others are looked at in each call."""
    for dtype in (torch.uint8, torch.int32, torch.int64):
        x = torch.tensor([1, 2, 3], dtype=dtype)
        on_device = x.to("tpu")
        for number in (5, 127, 0, 2.5, -1, 300, 2**40, 5):
            try:
                known = (x + number).tolist()
            except RuntimeError as error:
                with pytest.raises(RuntimeError, match=str(error)):
                    on_device + number
            else:
                assert (on_device + number).tolist() == known
    with mock.patch.object(Operator, "_call_any", side_effect=AssertionError("not recognised")):
        assert (on_device + 126).tolist() == [127, 128, 129]
        assert (on_device + 1.5).tolist() == [2.5, 3.5, 4.5]


def test_flags_are_not_numbers():
    x = numbers(3, 4)
    for unbiased in (0, 1, False, True):
        same(lambda x, u=unbiased: torch.var(x, bool(u)) if isinstance(u, bool) else torch.var(x, u), x)
    for keepdim in (True, False):
        same(lambda x, k=keepdim: torch.argmax(x, 1, k), x)
    for dim in (0, 1):
        same(lambda x, d=dim: torch.softmax(x, d), x)
        same(lambda x, d=dim: torch.cumsum(x, d), x)


def test_names():
    for approximate in ("none", "tanh"):
        same(lambda x, a=approximate: torch.nn.functional.gelu(x, approximate=a), numbers(4) - 2)


def test_shared_storages():
    x, y, z = numbers(3, 3), numbers(3, 3) * 2, numbers(3, 3) - 5
    for tensors in ((x, x), (x, y), (y, y), (x, z)):
        same(torch.add, *tensors)
        same(torch.mm, *tensors)
    on_device = x.to("tpu"), y.to("tpu"), z.to("tpu")
    for i, j, k in ((0, 0, 0), (0, 1, 2), (0, 1, 0), (0, 0, 1), (1, 0, 0), (2, 1, 0)):
        given, expected = (on_device[i], on_device[j], on_device[k]), (x, y, z)
        result = torch.addmm(*given)
        torch.testing.assert_close(result.cpu(), torch.addmm(expected[i], expected[j], expected[k]))


def test_views_and_other_dtypes():
    x = numbers(4, 4)
    same(torch.exp, x)
    for view in (lambda x: x.t(), lambda x: x[1:3], lambda x: x[:, 1], lambda x: x.view(2, 8), lambda x: x[2:].T):
        same(lambda x, v=view: torch.sqrt(v(x)), x)
    same(lambda x: torch.sign(x.view(torch.int32)), x)
    same(torch.sqrt, x.double())


def test_a_tensor_that_changes_its_shape_in_place():
    x = numbers(2, 3).to("tpu")
    assert x.neg().shape == (2, 3)
    x.t_()
    assert x.neg().tolist() == (-numbers(2, 3).t()).tolist()
    x.unsqueeze_(0)
    assert x.neg().shape == (1, 3, 2)


def test_conjugated_tensors():
    x = torch.complex(numbers(3, 3), numbers(3, 3))
    same(torch.mm, x, x)
    same(lambda x: torch.mm(x.conj(), x), x)
    same(torch.abs, x)


def test_the_default_dtype():
    x = torch.tensor([1, 2, 3])
    same(torch.sqrt, x)
    torch.set_default_dtype(torch.float64)
    try:
        same(torch.sqrt, x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_precision_of_products():
    x = numbers(3, 3).to("tpu")
    before = torch.get_float32_matmul_precision()
    try:
        programs = []
        for precision in ("highest", "medium", "highest", "medium", "highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            began = metrics.counters().get("program", 0)
            torch.mm(x, x)
            programs.append(metrics.counters().get("program", 0) - began)
    finally:
        torch.set_float32_matmul_precision(before)
    assert programs[2:] == [0, 0, 0, 0]
    kinds = [plan for key, plan in fast_path.fast_path_plans.items() if "medium" in key or "highest" in key]
    assert len(set(map(id, kinds))) == 2


def test_memory_nobody_has_written():
    written = torch.zeros(3, 3).to("tpu")
    for _ in range(2):
        assert (written + 1.0).tolist() == [[1.0] * 3] * 3
        assert (torch.empty(3, 3, device="tpu") * 0.0).tolist() == [[0.0] * 3] * 3


def test_values_pending_in_another_thread():
    x = numbers(3).to("tpu")
    assert (x + x * 2.0).tolist() == [3, 6, 9]
    made = []
    thread = threading.Thread(target=lambda: made.append(x * 2.0))
    thread.start()
    thread.join()
    assert (x + made[0]).tolist() == [3, 6, 9]


def test_writes_stay_writes():
    x, y = numbers(3).to("tpu"), numbers(3).to("tpu")
    for n in range(1, 4):
        x.add_(y)
        assert x.tolist() == [n + 1, 2 * n + 2, 3 * n + 3]
    assert (x + x).tolist() == [8, 16, 24]


def test_rehearsed_calls_are_forgotten():
    """Their plans return zeros."""
    x = numbers(3).to("tpu")
    torch.tpu.synchronize()
    with reach._rehearsal():
        for _ in range(2):
            x.log1p()
    for _ in range(2):
        torch.testing.assert_close(x.log1p().cpu(), numbers(3).log1p())
