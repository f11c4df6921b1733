"""Several calls in a row, a few entries for each axis: what is kept from call to call gives no call another's values.

All of the database goes along the axes in `make conformance`, and a slice of it a day in test_rotating_slice.py.
"""

from __future__ import annotations

import pytest

from tests.database.compare import assert_conforms, in_float32
from tools.conformance.backward_calls import CALLS, NOT_HERE, masked_operators
from tools.conformance.database import Entry
from tools.conformance.operators import AXES


def named(*names: str, kind: str = "operator") -> list[Entry]:
    found = [e for e in in_float32(kind) if e.op in names]
    assert {e.op for e in found} == set(names)
    return found


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("entry", named("add", "index_select", "nn.functional.dropout", "trace"), ids=str)
def test_every_axis(entry: Entry, mode: str) -> None:
    assert_conforms(entry, samples=1, checks=AXES, mode=mode)


# Their programs read where a view begins.
@pytest.mark.parametrize(
    "entry",
    named(
        *("alias_copy", "as_strided_copy", "as_strided_scatter", "diag", "diag_embed", "diagonal_copy"),
        *("diagonal_scatter", "expand_copy", "permute_copy", "split_with_sizes_copy", "unfold_copy", "view_copy"),
    ),
    ids=str,
)
def test_offsets(entry: Entry) -> None:
    assert_conforms(entry, samples=2, checks=["offsets"])


@pytest.mark.parametrize("entry", named("addmv", "clamp", "lerp", "nn.functional.leaky_relu"), ids=str)
def test_numbers(entry: Entry) -> None:
    assert_conforms(entry, samples=2, checks=["numbers"])


@pytest.mark.parametrize("entry", named("bernoulli", "normal", "rand_like", "randint"), ids=str)
def test_generators(entry: Entry) -> None:
    assert_conforms(entry, samples=2, checks=["generators"])


@pytest.mark.parametrize("entry", named("cat", "mul", "nn.functional.linear"), ids=str)
def test_sharing_and_threads(entry: Entry) -> None:
    assert_conforms(entry, samples=1, checks=["shared", "threads"])


@pytest.mark.parametrize(
    "entry", named("native_batch_norm", "nn.functional.conv1d", "nn.functional.layer_norm"), ids=str
)
def test_subsets(entry: Entry) -> None:
    assert_conforms(entry, samples=1, checks=["subsets"])


@pytest.mark.parametrize("entry", named("nn.BatchNorm1d", "nn.InstanceNorm1d", kind="module"), ids=str)
def test_module(entry: Entry) -> None:
    assert_conforms(entry, samples=1, checks=["again", "offsets", "subsets"])


@pytest.mark.parametrize("entry", [e for e in named("AdamW", kind="optimizer") if e.variant == "foreach"], ids=str)
def test_optimizer(entry: Entry) -> None:
    assert_conforms(entry, samples=1, checks=AXES)


@pytest.mark.parametrize("entry", named("diagonal_copy", kind="compiled"), ids=str)
def test_compiled(entry: Entry) -> None:
    assert_conforms(entry, samples=1, checks=["again", "offsets", "shared", "threads"])


@pytest.mark.parametrize("entry", in_float32("backward"), ids=str)
def test_masks(entry: Entry) -> None:
    assert_conforms(entry, samples=3, checks=["masks"])


def test_every_operator_with_a_mask_is_called() -> None:
    called = {name for name, _ in CALLS}
    assert called.isdisjoint(NOT_HERE)
    assert called | set(NOT_HERE) == set(masked_operators())
