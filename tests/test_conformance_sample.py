"""A fixed sample of the conformance run: operators that models use, in float32, on two sample inputs each."""

from __future__ import annotations

import pytest

from tests.conformance import check
from tests.conformance.database import Entry

OPERATORS = """
    add sub mul div.no_rounding_mode pow remainder neg abs exp log sqrt rsqrt sin tanh sigmoid erf sign clamp maximum
    where eq lt masked_fill sum mean amax argmax var std norm cumsum sort topk
    matmul mm bmm addmm linalg.inv linalg.cholesky
    reshape transpose permute expand cat stack split narrow index_select gather scatter scatter_add index_put
    take_along_dim nn.functional.relu nn.functional.gelu nn.functional.silu softmax log_softmax nn.functional.layer_norm
    nn.functional.batch_norm nn.functional.conv2d nn.functional.max_pool2d nn.functional.embedding
    nn.functional.cross_entropy nn.functional.mse_loss nn.functional.interpolate.bilinear nn.functional.pad.constant
    _foreach_add _foreach_sqrt
""".split()  # noqa: SIM905  (a list of sixty lines reads no better)


def _entry(name: str) -> Entry:
    """The database's name of an operator ends in that of its variant, if it has one."""
    for variant in ("no_rounding_mode", "bilinear", "constant"):
        if name.endswith(f".{variant}"):
            return Entry(name.removesuffix(f".{variant}"), variant, "float32")
    return Entry(name, "", "float32")


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    outcome = check.run(_entry(name), samples=2, checks=("forward", "gradient", "inplace", "errors"))
    assert outcome.samples
    assert outcome.failures == []
    assert outcome.fallbacks == {}
