"""Optimizers and gradient scaling: five steps give what they give on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.compare import assert_same, check, no_fallback
from torch_tpu import metrics


def trained(device: str, optimizer: type[torch.optim.Optimizer], steps: int = 5, **options: Any) -> list[Any]:
    """Parameters and optimizer state after some steps on a little model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(device)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(device)
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = options["lr"].to(device)
    steppers = optimizer(model.parameters(), **options)
    for _ in range(steps):
        steppers.zero_grad()
        model(x).square().mean().backward()
        steppers.step()
    state = [v for s in steppers.state.values() for k, v in sorted(s.items()) if isinstance(v, torch.Tensor)]
    return [[p.detach().cpu() for p in model.parameters()], [v.cpu() for v in state]]


CASES = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("form", ["default", "loop", "foreach", "fused", "capturable"])
@pytest.mark.parametrize(("optimizer", "options"), CASES)
def test_five_steps(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], form: str) -> None:
    if form == "capturable" and optimizer in (torch.optim.SGD, torch.optim.Adagrad):
        pytest.skip(f"{optimizer.__name__} takes no capturable=")
    extra = {"default": {}, "loop": {"foreach": False}}.get(form, {form: True})
    reference = {} if form == "capturable" else extra
    with no_fallback():
        got = trained("tpu", optimizer, **options, **extra)
    # Five steps add up the last digits' differences.
    assert_same(got, trained("cpu", optimizer, **options, **reference), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_with_a_tensor_learning_rate(optimizer: type[torch.optim.Optimizer]) -> None:
    with no_fallback():
        got = trained("tpu", optimizer, lr=torch.tensor(0.02), fused=True)
    assert_same(got, trained("cpu", optimizer, lr=torch.tensor(0.02), fused=True), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_changing_learning_rate_does_not_recompile(optimizer: type[torch.optim.Optimizer]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="tpu"))
    steppers = optimizer([parameter], lr=0.1, weight_decay=0.01, fused=True)
    compiled = []
    for step in range(6):
        parameter.grad = torch.ones(3, device="tpu")
        steppers.step()
        compiled.append(metrics.counters().get("program", 0))
        steppers.param_groups[0]["lr"] = 0.1 / (step + 2)
        steppers.param_groups[0]["weight_decay"] = 0.01 * step
    assert compiled[-1] == compiled[1]
    assert parameter.cpu().isfinite().all()


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_step_unscales_and_skips(name: str, found: float) -> None:
    numbers = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
    lists = 2 if name == "_fused_sgd_" else 3
    if name in ("_fused_adam_", "_fused_adamw_"):
        numbers |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": True}
        lists = 5
    elif name == "_fused_sgd_":
        numbers |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        lists = 3
    else:
        numbers |= {"lr_decay": 0.0, "eps": 1e-10}

    def run(
        lists: list[list[torch.Tensor]], steps: list[torch.Tensor], scale: torch.Tensor, flag: torch.Tensor
    ) -> None:
        rest = [] if name == "_fused_sgd_" else [steps]
        getattr(torch, name)(*lists, *rest, **numbers, grad_scale=scale, found_inf=flag)

    check(
        run,
        [[torch.rand(3, 2), torch.rand(4)] for _ in range(lists)],
        [torch.tensor(3.0), torch.tensor(3.0)],
        torch.tensor(128.0),
        torch.tensor(found),
        rtol=1e-5,
        atol=1e-6,
    )


def test_fused_adam_of_bfloat16_parameters() -> None:
    def run(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        p.grad = g
        steppers = torch.optim.AdamW([p], lr=0.1, fused=True)
        steppers.step()
        return p.detach() * 1

    check(run, torch.randn(5, dtype=torch.bfloat16, requires_grad=True), torch.randn(5, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscale(dtype: torch.dtype, bad: float | None) -> None:
    grads = [torch.randn(3, 4).to(dtype), torch.randn(5).to(dtype)]
    if bad is not None:
        grads[1][2] = bad
    check(torch._amp_foreach_non_finite_check_and_unscale_, grads, torch.zeros(1), torch.tensor(0.25))


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 2])
@pytest.mark.parametrize("scale", [1024.0, 3e38])
def test_update_scale(found: float, tracker: int, scale: float) -> None:
    check(
        lambda s, t, f: torch._amp_update_scale_(s, t, f, 2.0, 0.5, 3),
        torch.tensor(scale),
        torch.tensor(tracker, dtype=torch.int32),
        torch.tensor(found),
    )


def test_update_scale_of_one_element_in_any_shape() -> None:
    tracker = torch.tensor([2], dtype=torch.int32)
    check(lambda *args: torch._amp_update_scale_(*args, 2.0, 0.5, 3), torch.tensor(8.0), tracker, torch.zeros(1, 1))


def test_grad_scaler_skips_a_step_with_an_infinity() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="tpu"))
    steppers = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0, growth_interval=1)
    for factor, value, scale in ((1.0, 0.5, 16.0), (float("inf"), 0.5, 8.0), (1.0, 0.0, 16.0)):
        steppers.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(steppers)
        scaler.update()
        assert parameter.tolist() == [value, value]
        assert scaler.get_scale() == scale
