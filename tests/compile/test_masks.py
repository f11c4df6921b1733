"""Writing through a mask is part of a program; reading through one runs between two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.compile.programs import check_compiled, compiled
from torch_tpu import metrics

X = torch.arange(24.0).reshape(2, 3, 4)
ALL = X % 5 > 1
FIRST, MIDDLE, LAST = (
    torch.tensor([False, True]),
    torch.tensor([True, False, True]),
    torch.tensor([True, True, False, True]),
)


def written(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    x = x.clone()
    x[mask] = value
    return x


@pytest.mark.parametrize(
    "value", [0.0, torch.tensor(5.0), torch.tensor([5.0]), torch.arange(1.0, 1 + int(ALL.sum()))], ids=str
)
def test_elements(value: torch.Tensor | float) -> None:
    check_compiled(written, X, ALL, value, gradients=False)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("indices", "shape"),
    [
        ([FIRST], (1, 3, 4)),
        ([FIRST], (4,)),
        ([None, MIDDLE], (2, 2, 4)),
        ([None, MIDDLE], (1, 1)),
        ([None, None, LAST], (2, 3, 3)),
        ([None, ALL[0]], (2, int(ALL[0].sum()))),
    ],
    ids=str,
)
def test_slices(indices: list[torch.Tensor | None], shape: tuple[int, ...], accumulate: bool) -> None:
    def put(x: torch.Tensor, values: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        given = iter(masks)
        places = [None if i is None else next(given) for i in indices]
        return torch.ops.aten.index_put(x, places, values, accumulate)

    check_compiled(put, X, torch.rand(shape), *(i for i in indices if i is not None), gradients=False)


def test_gradients() -> None:
    check_compiled(lambda x, m: (written(x, m, 2.0) ** 2).sum(), X, ALL)


def test_as_many_values_as_true_elements() -> None:
    run = compiled(written)
    with pytest.raises(RuntimeError, match=r"value tensor of shape \[2\] cannot be broadcast .* shape \[14\]"):
        run(X.to("tpu"), ALL.to("tpu"), torch.ones(2, device="tpu")).cpu()


@pytest.mark.parametrize(
    "read",
    [
        lambda x, m: (x * 2)[m] + 1,
        lambda x, m: (x * 2)[:, m[0]].sum(1),
        lambda x, m: torch.ops.aten.index_put(x, [torch.tensor([0, 1, 1], device=x.device), m[0, :, 1]], x[:1, 0] * 2),
    ],
    ids=["elements", "slices", "beside an index"],
)
def test_what_needs_positions_runs_between_programs(read: Callable[..., torch.Tensor]) -> None:
    mask = torch.ones(2, 3, 4, dtype=torch.bool) if read.__code__.co_names.count("index_put") else ALL
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = compiled(read)(X.to("tpu"), mask.to("tpu"))
    torch.testing.assert_close(result.cpu(), read(X, mask))
    assert metrics.counters()["graph_cut"] == 1
