"""`use_deterministic_algorithms(True)`: nothing raises that is deterministic, and fresh memory is filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

EagerMode = torch.tpu.EagerMode
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with torch.tpu.set_eager_mode(request.param):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


OPERATORS: dict[str, Callable[[torch.Tensor], object]] = {
    "median": lambda x: torch.median(x, 0),
    "median without dimension": torch.median,
    "nanmedian": lambda x: torch.nanmedian(x, 0),
    "mode": lambda x: torch.mode(x, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 1, 0),
    "histc": lambda x: torch.histc(x, 3),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "bincount": lambda x: torch.bincount(x.long(), x),
    "scatter_add": lambda x: x.scatter_add(0, x.long() - 1, x),
    "index_add": lambda x: x.index_add(0, x.long() - 1, x),
    "index_put that adds": lambda x: x.index_put((x.long() - 1,), x, accumulate=True),
    "interpolate": lambda x: F.interpolate(x[None, None], 5, mode="linear"),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x[None], 2),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_raises(name: str) -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    known, found = OPERATORS[name](x), OPERATORS[name](x.to("tpu"))
    for k, f in zip(*(r if isinstance(r, tuple) else (r,) for r in (known, found)), strict=True):
        torch.testing.assert_close(f.cpu(), k)


FRESH: dict[str, Callable[[torch.dtype, str], torch.Tensor]] = {
    "empty": lambda dtype, device: torch.empty(2, 3, dtype=dtype, device=device),
    "channels last": lambda dtype, device: torch.empty(
        1, 2, 2, 3, dtype=dtype, device=device, memory_format=torch.channels_last
    ),
    "empty_strided": lambda dtype, device: torch.empty_strided((2, 3), (4, 1), dtype=dtype, device=device),
    "empty_permuted": lambda dtype, device: torch.empty_permuted((2, 3), (1, 0), dtype=dtype, device=device),
    "empty_like": lambda dtype, device: torch.empty_like(torch.zeros(2, dtype=dtype, device=device)),
    "new_empty": lambda dtype, device: torch.zeros(2, dtype=dtype, device=device).new_empty(3),
    "new_empty_strided": lambda dtype, device: torch.zeros(2, dtype=dtype, device=device).new_empty_strided((3,), (1,)),
    "resize_": lambda dtype, device: torch.ones(2, dtype=dtype, device=device).resize_(2, 3),
    "resize_ from nothing": lambda dtype, device: torch.empty(0, dtype=dtype, device=device).resize_(3),
    "empty into out": lambda dtype, device: torch.empty(3, out=torch.empty(0, dtype=dtype, device=device)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FRESH)
def test_fresh_memory_is_filled(name: str, dtype: torch.dtype) -> None:
    known, found = FRESH[name](dtype, "cpu"), FRESH[name](dtype, "tpu")
    assert found.stride() == known.stride()
    known, found = (t.cpu().contiguous().view(torch.uint8) for t in (known, found))
    assert torch.equal(known, found)


def test_filling_can_be_turned_off() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert not torch.empty(2, device="tpu").isnan().any()
    assert not torch.ones(1, device="tpu").resize_(3).isnan().any()


def test_in_a_compiled_graph() -> None:
    @torch.compile
    def fresh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x) + x, torch.empty(2, dtype=torch.int32, device=x.device)

    x = torch.ones(2, device="tpu")
    for fills in (True, False, True):
        torch.utils.deterministic.fill_uninitialized_memory = fills
        number, integer = fresh(x)
        assert number.isnan().all().item() is fills
        assert (integer == 2**31 - 1).all().item() is fills


def test_other_devices_are_still_told() -> None:
    """What is let through is tracing for the device, nothing else."""
    from torch._prims_common import alert_not_deterministic

    torch.empty(3, device="tpu").median(0)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        alert_not_deterministic("something")
