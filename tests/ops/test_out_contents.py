"""`out=` of another shape or dtype is judged by the call's own contents, not by an error made up from zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_tpu.runtime.process_client import client

EagerMode = torch.tpu.EagerMode


@pytest.fixture(autouse=True, params=[EagerMode.DEFER_NEVER, EagerMode.DEFER_AND_FUSE])
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not client().calls_lapack:
        monkeypatch.setenv("TORCH_TPU_FALLBACK", "allow")  # the host has LAPACK
    with torch.tpu.set_eager_mode(request.param):
        yield


# Of a matrix that is symmetric and positive definite, whose zeros would be singular.
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "cholesky": lambda a, out: torch.linalg.cholesky(a, out=out),
    "cholesky_inverse": lambda a, out: torch.cholesky_inverse(a, out=out),
    "cholesky_solve": lambda a, out: torch.cholesky_solve(a, a, out=out),
    "inv": lambda a, out: torch.linalg.inv(a, out=out),
    "solve": lambda a, out: torch.linalg.solve(a, a, out=out),
    "triangular solve": lambda a, out: torch.linalg.solve_triangular(a, a, upper=True, out=out),
    "eigvalsh": lambda a, out: torch.linalg.eigvalsh(a, out=out),
    "det": lambda a, out: torch.linalg.det(a, out=out),
    "pinv": lambda a, out: torch.linalg.pinv(a, out=out),
    "matrix_power": lambda a, out: torch.linalg.matrix_power(a, -1, out=out),
}
OUTS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0),
    "of another shape": lambda: torch.full((5, 2), 7.0),
    "of a wider dtype": lambda: torch.full((3, 3), 7.0, dtype=torch.float64),
    "of integers": lambda: torch.full((3, 3), 7),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str, out: str) -> None:
    a = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 2.0]])
    outcomes = []
    for device in ("cpu", "tpu"):
        result = OUTS[out]().to(device)
        try:
            CALLS[name](a.to(device), result)
        except RuntimeError as error:
            outcomes.append((type(error), OUTS[out]()))
            # The CPU has sometimes written by then.
            assert device == "cpu" or torch.equal(result.cpu(), OUTS[out]())
        else:
            outcomes.append((None, result.cpu()))
    (known, want), (raised, got) = outcomes
    assert raised is known
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_multinomial() -> None:
    p = torch.tensor([0.0, 1.0], device="tpu")
    for out in (torch.empty(0, dtype=torch.int64, device="tpu"), torch.zeros(1, dtype=torch.int64, device="tpu")):
        assert torch.multinomial(p, 1, out=out).tolist() == [1]
    with pytest.raises(RuntimeError, match="expects Long tensor out"):
        torch.multinomial(p, 1, out=torch.empty(0, device="tpu"))


def test_what_is_singular_is_said_to_be() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(3, 3, device="tpu"), out=torch.empty(0, device="tpu")).cpu()
