"""Reports about warnings: each names the user's line, once per line as Python's own filter has it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_tpu.metrics.user_warnings import warn

fallback = torch.ops.aten._test_optional_intlist  # an operator for which nobody needs a lowering


def numbers(*values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="tpu")


def mask() -> torch.Tensor:
    return numbers(1, 0, 1, dtype=torch.uint8)


def complex_numbers() -> torch.Tensor:
    return numbers(1j, 2, 3)


UINT8, IMAGINARY = "dtype torch.uint8", "discards the imaginary part"

# What to call, on a line of its own below, and what is said. Host and device tensors go both ways.
CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mask": (UINT8, lambda: numbers(1, 2, 3)[mask()]),
    "mask of the host": (UINT8, lambda: numbers(1, 2, 3)[mask().cpu()]),
    "mask of the second dimension": (UINT8, lambda: numbers([1, 2, 3])[:, mask()]),
    "written through a mask": (UINT8, lambda: numbers(1, 2, 3).__setitem__(mask(), numbers(4, 5))),
    "added through a mask": (UINT8, lambda: numbers(1, 2, 3).index_put_((mask(),), numbers(4), accumulate=True)),
    "real part": (IMAGINARY, lambda: complex_numbers().to(torch.float32)),
    "integers": (IMAGINARY, lambda: complex_numbers().int()),
    "real part to the host": (IMAGINARY, lambda: complex_numbers().to("cpu", torch.float32)),
    "real part from the host": (IMAGINARY, lambda: complex_numbers().cpu().to("tpu", torch.float32)),
    "copied": (IMAGINARY, lambda: numbers(1.0, 2.0, 3.0).copy_(complex_numbers())),
    "copied to the host": (IMAGINARY, lambda: torch.zeros(3).copy_(complex_numbers())),
    "copied from the host": (IMAGINARY, lambda: numbers(1.0, 2.0, 3.0).copy_(complex_numbers().cpu())),
    "half precision": ("ComplexHalf", lambda: numbers(1.0, 2.0).to("cpu", torch.complex32)),
    "result of another shape": ("resized", lambda: torch.add(mask(), mask(), out=mask()[:2].clone())),
    "fallback": ("runs on the CPU", lambda: fallback(numbers(10, 20, dtype=torch.int32), [1, 2])),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_users_line_is_named(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_TPU_FALLBACK", "warn")
    said, call = CALLS[name]
    mode = torch.tpu.EagerMode.DEFER_AND_FUSE if fused else torch.tpu.EagerMode.DEFER_NEVER
    torch.set_warn_always(True)
    try:
        with torch.tpu.set_eager_mode(mode), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
            call()
    finally:
        torch.set_warn_always(False)
    ours = [w for w in seen if said in str(w.message)]
    line = call.__code__.co_firstlineno
    assert {(w.filename, w.lineno) for w in ours} == {(__file__, line)}
    assert len(ours) == 2


def test_once_per_line_by_default() -> None:
    x, i = numbers(1, 2, 3), mask()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            x[i]
            x[i]
    assert len(seen) == 2
    assert seen[1].lineno == seen[0].lineno + 1


def test_filters_know_the_module() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        numbers(1, 2, 3)[mask()]
    assert seen == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=UINT8):
            numbers(1, 2, 3)[mask()]


def test_values_stay_the_cpus() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j, 5j])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bool):
            want = z.conj().to(dtype)
            assert torch.equal(z.to("tpu").conj().to(dtype).cpu(), want)
            assert torch.equal(z.conj().to("tpu", dtype).cpu(), want)
            assert torch.equal(torch.zeros(3, dtype=dtype).copy_(z.to("tpu").conj()), want)
            assert torch.equal(torch.zeros(3, dtype=dtype, device="tpu").copy_(z.to("tpu").conj()).cpu(), want)


def test_a_mask_of_bytes_is_refused_where_the_cpu_does() -> None:
    for device in ("cpu", "tpu"):
        x, i = torch.arange(3.0, device=device), mask().to(device)
        with pytest.raises(RuntimeError, match="masked_fill_ only supports boolean masks"):
            x[i] = 1.0
        assert x.tolist() == [0, 1, 2]


def test_inside_of_backward_it_is_the_call_of_backward() -> None:
    """PyTorch runs it in a thread of its own, where no line of the user's may be."""
    x = torch.ones(2, device="tpu", requires_grad=True)
    x.register_hook(eval(compile("lambda grad: warn('from backward')", torch.__file__, "eval"), {"warn": warn}))
    y = (x * 2).sum()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y.backward()
    line = test_inside_of_backward_it_is_the_call_of_backward.__code__.co_firstlineno + 7
    assert [(w.filename, w.lineno) for w in seen if str(w.message) == "from backward"] == [(__file__, line)]


def test_a_line_that_has_been_left_is_named() -> None:
    """Fused programs run later than the line that recorded them."""

    def recorded() -> None:
        pass

    place = (recorded.__code__, 0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        threads = [threading.Thread(target=warn, args=("late",), kwargs={"place": place}) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        warn("late", place=place)
    assert [(w.filename, w.lineno) for w in seen] == [(__file__, recorded.__code__.co_firstlineno)]


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_variances_of_too_few_elements(name: str) -> None:
    """In each call, at its line, as on the CPU."""
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: getattr(torch, name)(x[:1, 0]),
        lambda x: getattr(torch, name)(x, dim=0),
        lambda x: getattr(torch, name)(x, dim=(0, -1), correction=7),
        lambda x: getattr(torch, name)(x, dim=1),
        lambda x: getattr(torch, name)(x[:, :0], dim=0),
        lambda x: getattr(torch, name)(x[:0], dim=0),
        lambda x: getattr(torch, name)(x[0, 0]),
        lambda x: torch.cov(x[:, :1]),
    ]
    seen: dict[str, list[list[tuple[str, str, int]]]] = {}
    for device in ("cpu", "tpu", "tpu"):
        x = torch.ones(1, 3).to(device)
        seen[device] = []
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(x)
            said = [(str(w.message).partition(" (Triggered")[0], w.filename, w.lineno) for w in caught]
            seen[device].append(said)
    assert seen["tpu"] == seen["cpu"]
    assert [len(said) for said in seen["cpu"]].count(1) >= 5
