"""Operators without a lowering: counted, warned about once by name and line, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from tools.compare import assert_same
from torch_tpu import metrics
from torch_tpu.eager.host import fallback

NAME = "aten::_test_optional_intlist"  # an operator of PyTorch's own tests, for which nobody needs a lowering
operator = torch.ops.aten._test_optional_intlist


def _values() -> torch.Tensor:
    return torch.tensor([10, 20], dtype=torch.int32)


def test_runs_on_the_cpu_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    x = _values()
    before = metrics.counters().get(f"fallback::{NAME}", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = operator(x.to("tpu"), [1, 2])
    assert got.device.type == "tpu"
    assert_same(got, operator(x, [1, 2]))
    assert got.tolist() == [11, 22]
    assert metrics.counters()[f"fallback::{NAME}"] == before + 1
    assert "_test_optional_intlist" in metrics.report(10**6)


def test_a_warning_for_each_line_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "warn")
    x = _values().to("tpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            operator(x, [1, 2])
            operator(x, [1, 2])
    ours = [w for w in caught if f"{NAME} runs on the CPU" in str(w.message)]
    assert [w.filename for w in ours] == [__file__] * 2
    assert ours[1].lineno == ours[0].lineno + 1


def test_error_policy_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    with pytest.raises(NotImplementedError, match=r"_test_optional_intlist.*test_fallback\.py:\d+.*forbids"):
        operator(_values().to("tpu"), None)


def test_error_policy_leaves_the_cpu_its_own_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidding the fallback hides no mistake of the program's."""
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "error")
    with pytest.raises(RuntimeError, match="does not support complex") as raised:
        torch.ones(3, dtype=torch.complex64, device="tpu").min(0)
    assert raised.type is RuntimeError


def test_unknown_policy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "never")
    with pytest.raises(ValueError, match="'never': expected allow, warn or error"):
        operator(_values().to("tpu"), None)


def test_results_the_device_has_no_tensors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    with pytest.raises(NotImplementedError, match="sparse_coo"):
        fallback.run_on_cpu(torch.ops.aten._to_sparse.default, (torch.eye(2, device="tpu"),), {}, "")


def test_custom_operator_in_python() -> None:
    @torch.library.custom_op("torch_tpu_test::scaled_sum", mutates_args=())
    def scaled_sum(x: torch.Tensor, factor: float) -> torch.Tensor:
        return (x * factor).sum(-1)

    @scaled_sum.register_fake
    def _(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.new_empty(x.shape[:-1])

    def set_up(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.shape, ctx.factor = inputs[0].shape, inputs[1]

    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple:
        return (grad * ctx.factor).unsqueeze(-1).expand(ctx.shape), None

    scaled_sum.register_autograd(backward, setup_context=set_up)
    x = torch.arange(6.0).reshape(2, 3).to("tpu").requires_grad_()
    result = scaled_sum(x, 0.5)
    result.sum().backward()
    assert result.tolist() == [1.5, 6.0]
    assert x.grad.tolist() == [[0.5] * 3] * 2


def test_an_operator_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for the CPU serves; results and what it writes come back to the device."""
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    with torch.library._scoped_library("torch_tpu_test", "DEF") as library:
        library.define("shifted(Tensor(a!) x, Tensor y) -> Tensor")
        library.impl("shifted", lambda x, y: x.add_(y) * 2, "CPU")
        x, y = torch.arange(3.0, device="tpu"), torch.ones(3, device="tpu")
        got = torch.ops.torch_tpu_test.shifted(x, y)
        assert (got.device.type, got.tolist(), x.tolist()) == ("tpu", [2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
        library.define("nowhere(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match="no CPU kernel"):
            torch.ops.torch_tpu_test.nowhere(x)


def test_what_is_written_though_the_schema_does_not_say_so_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics of a batch_norm that runs on the CPU."""
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")
    x, settings = torch.randn(4, 3, 5), (True, 0.1, 1e-5)
    mean, variance = torch.zeros(3), torch.ones(3)
    want = torch.native_batch_norm(x, None, None, mean, variance, *settings)[0]
    on_device = [t.to("tpu") for t in (torch.zeros(3), torch.ones(3))]
    args = (x.to("tpu"), None, None, *on_device, *settings)
    got = fallback.run_on_cpu(torch.ops.aten.native_batch_norm.default, args, {}, "of a test")[0]
    for found, known in zip((got, *on_device), (want, mean, variance), strict=True):
        torch.testing.assert_close(found.cpu(), known, rtol=0, atol=0)
