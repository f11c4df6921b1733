"""Indexing by tensors, masks and slices: values, gradients, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import assert_same, check, check_opinfo
from torch_tpu import metrics

f32, bf16, i64, b8, c64 = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize(
    "name", ["index_select", "gather", "take", "take_along_dim", "put", "__getitem__", "index_put"]
)
def test_sample_inputs(name: str) -> None:
    check_opinfo(name, (f32,), samples=12)
    check_opinfo(name, (bf16, i64, b8, c64), samples=2)


INDEX = torch.tensor([[2, 0, -1], [1, 1, -3]])
COLUMNS = torch.tensor([0, 3, 3])
MASK = torch.tensor([True, False, True])

EXPRESSIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "first": lambda i: (i(INDEX),),
    "middle": lambda i: (slice(None), i(COLUMNS)),
    "last": lambda i: (..., i(COLUMNS)),
    "adjacent": lambda i: (slice(None), i(COLUMNS), i(COLUMNS)),
    "separated": lambda i: (i(INDEX), slice(None), i(COLUMNS)),
    "broadcast": lambda i: (i(INDEX)[:, :, None], i(COLUMNS)),
    "with number": lambda i: (1, slice(None), i(COLUMNS)),
    "number between": lambda i: (i(INDEX), 2, i(COLUMNS)),
    "with slice": lambda i: (slice(0, 3, 2), i(COLUMNS), slice(1, None, 2)),
    "with new axis": lambda i: (None, i(COLUMNS[:1]), None, i(COLUMNS[1:])),
    "mask": lambda i: (i(MASK),),
    "mask in the middle": lambda i: (slice(None), i(torch.tensor([True, False, False, True])), slice(2)),
    "mask and index": lambda i: (i(MASK), i(torch.tensor([3, 0]))),
    "mask of two dimensions": lambda i: (i(torch.arange(12).reshape(3, 4) % 5 == 0),),
    "mask of all dimensions": lambda i: (i(torch.arange(60).reshape(3, 4, 5) % 7 == 0),),
    "no element": lambda i: (i(torch.zeros(0, dtype=torch.int64)), slice(1)),
    "mask without an element": lambda i: (i(torch.zeros(3, dtype=torch.bool)),),
    "int32": lambda i: (i(INDEX.int()), i(COLUMNS.int())),
    "0-d": lambda i: (i(torch.tensor(2)), slice(None), i(torch.tensor(-1))),
    "list": lambda i: ([2, 0, 0],),
    "numbers and slices": lambda i: (slice(None, None, 2), -1, slice(4, 0, 1)),
    "ellipsis": lambda i: (..., None, 0, slice(1, 4, 3)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_read_and_write(name: str) -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        where = EXPRESSIONS[name](lambda index: index.to(x.device))
        read = x[where]
        written = x.detach().clone()
        written[where] = 7
        of_tensor = x * 1
        of_tensor[where] = -2 * read
        of_row = x.detach().clone()
        of_row[where] = read[..., :1].detach() if read.dim() else read.detach()
        return [read, written, of_tensor, of_row]

    check(run, torch.randn(3, 4, 5, requires_grad=True))


def test_index_tensors_on_the_host() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y[INDEX] = torch.tensor(3.0)
        y[MASK] = torch.tensor(4.0)
        return [x[INDEX], x[:, COLUMNS], x[MASK], y]

    check(run, torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [f32, bf16, torch.float64, i64, torch.uint8, b8, c64])
@pytest.mark.parametrize("accumulate", [True, False])
def test_values_broadcast_over_the_indexed_block(dtype: torch.dtype, accumulate: bool) -> None:
    def run(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.index_put(x, [index], values, accumulate=accumulate),
            torch.index_put(x, [index], values[None, None, None], accumulate=accumulate),
            torch.ops.aten.index_put_(x.clone(), [None, index[0], index[:1, :1]], values[0], accumulate),
        ]

    x = torch.arange(48).reshape(6, 4, 2).to(dtype)
    check(run, x, torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([-7, 100]).to(dtype))


def test_repeated_indices_add_up_and_the_last_write_counts() -> None:
    def run(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.index_put((index,), values, accumulate=True),
            x.index_put((index,), values),
            x.put(index, values, accumulate=True),
            x.put(index, values),
        ]

    check(run, torch.randn(7), torch.arange(1000) % 7, torch.randn(1000), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [0, 0, 4], [4, 3, 2, 1, 0]])
@pytest.mark.parametrize(
    "how",
    [
        lambda x, i: x[:, i, :],
        lambda x, i: x.index_select(1, i),
        lambda x, i: x.gather(1, i.view(1, -1, 1).expand(x.shape[0], -1, x.shape[2])),
    ],
)
def test_gradient_of_the_middle_dimension(how: Callable[..., torch.Tensor], positions: list[int]) -> None:
    check(how, torch.randn(64, 5, 7, requires_grad=True), torch.tensor(positions))


def test_second_gradient() -> None:
    def run(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad((x[index] ** 3).sum(), x, create_graph=True)
        return g

    check(run, torch.randn(5, requires_grad=True), torch.tensor([0, 3, 3, -1]))


def test_tensors_without_elements() -> None:
    def run(e: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.gather(e, 0, i),
            e.index_select(0, i.reshape(-1)),
            x.take(i),
            x[i.reshape(-1)],
            x[:, 1:1],
            x.index_put((i.reshape(-1),), x[:0]),
            torch.zeros(0, 3, device=x.device)[:, :2],
        ]

    check(run, torch.empty(0, 1, 2, 0), torch.empty(0, 1, 2, 0, dtype=torch.int64), torch.randn(2, 3, 4))


BAD = [
    ("index", lambda x, i: x[i], IndexError, "index 5 is out of bounds for dimension 0 with size 3"),
    ("second index", lambda x, i: x[:, -i], IndexError, "index -5 is out of bounds for dimension 1 with size 4"),
    (
        "index_put",
        lambda x, i: x.index_put_((i,), x[0].clone()),
        IndexError,
        "index 5 is out of bounds for dimension 0 with size 3",
    ),
    ("setitem", lambda x, i: x.__setitem__(i, 1.0), IndexError, "index 5 is out of bounds for dimension 0 with size 3"),
    ("index_select", lambda x, i: x.index_select(0, i), IndexError, "index out of range in self"),
    ("index_select from the end", lambda x, i: x.index_select(0, i - 6), IndexError, "index out of range in self"),
    (
        "gather",
        lambda x, i: x.gather(0, i[:, None]),
        RuntimeError,
        "index 5 is out of bounds for dimension 0 with size 3",
    ),
    ("take", lambda x, i: x.take(i + 7), IndexError, "tried to access index 12 on a tensor of 12 elements"),
    (
        "put",
        lambda x, i: x.put_(i + 7, x[0, :1].clone()),
        IndexError,
        "tried to access index 12 on a tensor of 12 elements",
    ),
    ("float index", lambda x, i: x[i.float()], IndexError, "tensors used as indices must be long, int, byte or bool"),
    ("mask", lambda x, i: x[x[:2] > 0], IndexError, r"The shape of the mask \[2, 4\] at index 0 does not match"),
    (
        "shapes",
        lambda x, i: x[torch.stack([i, i]), torch.stack([i, i, i])],
        IndexError,
        "could not be broadcast together",
    ),
    ("values", lambda x, i: x.index_put((i * 0,), x[0, :3]), RuntimeError, "shape mismatch: value tensor of shape"),
    (
        "dtype",
        lambda x, i: x.index_put((i * 0,), i),
        RuntimeError,
        "got Float for the destination and Long for the source",
    ),
    ("vector", lambda x, i: x.index_select(0, i[None]), IndexError, "Index is supposed to be a vector"),
    ("empty dimension", lambda x, i: x[:0][i], IndexError, "index is out of bounds for dimension with size 0"),
    ("too many", lambda x, i: x[i, i, i], IndexError, "too many indices"),
]


@pytest.mark.parametrize(("function", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_wrong_indices(function: Callable[..., Any], error: type[Exception], message: str) -> None:
    def call() -> None:
        function(x, torch.tensor([5], device="tpu"))
        torch.tpu.synchronize()  # in fused mode the error comes when the program runs

    x = torch.arange(12.0, device="tpu").reshape(3, 4)
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(x.cpu(), torch.arange(12.0).reshape(3, 4)), "written although an index was out of range"


def test_changing_position_does_not_recompile() -> None:
    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (leaf[i].sum() + leaf[:, i : i + 2].sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    x = torch.randn(6, 6)
    on_device = x.to("tpu")
    step(on_device, 1)
    before = metrics.counters().get("program", 0)
    for i in range(2, 5):
        assert torch.equal(step(on_device, i).cpu(), step(x, i))
    assert metrics.counters().get("program", 0) == before


def test_filling_by_a_mask_does_not_wait() -> None:
    x = torch.randn(4, 5).to("tpu")
    before = metrics.counters().get("execute", 0)
    x[x > 0] = 0.0
    assert metrics.counters().get("execute", 0) <= before + 3  # comparison, the number as a tensor, fill
    assert (x <= 0).all().item()


def test_crops_by_interpolation() -> None:
    """A region-of-interest pooling written with tensors as indices."""

    def crop(image: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        y0, x0, y1, x1 = box.unbind(-1)
        k = (torch.arange(4, device=image.device) + 0.5) / 4
        ys = (y0[:, None] + (y1 - y0)[:, None] * k).clamp(0, image.shape[1] - 1)
        xs = (x0[:, None] + (x1 - x0)[:, None] * k).clamp(0, image.shape[2] - 1)
        top, left = ys.floor().long(), xs.floor().long()
        bottom, right = (top + 1).clamp(max=image.shape[1] - 1), (left + 1).clamp(max=image.shape[2] - 1)
        fy, fx = (ys - top)[:, None, :, None], (xs - left)[:, None, None, :]

        def at(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            return image[:, row[:, :, None], column[:, None, :]].transpose(0, 1)

        upper = at(top, left) * (1 - fx) + at(top, right) * fx
        lower = at(bottom, left) * (1 - fx) + at(bottom, right) * fx
        return upper * (1 - fy) + lower * fy

    boxes = torch.tensor([[0.0, 0.0, 8.0, 6.0], [1.3, 2.2, 5.9, 4.4], [-3.0, -1.0, 20.0, 9.0]])
    check(crop, torch.randn(2, 9, 7, requires_grad=True), boxes, rtol=1e-4, atol=1e-4)


NOTHING: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index": lambda x, i: (x[i], x.t()[:, i], x[[6]]),
    "index_put": lambda x, i: (x.index_put_((i,), x[:1].clone()), x.__setitem__(i, 1.0)),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_add": lambda x, i: x.index_add(0, i, x[:1]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:1]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:1], "amax"),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of no rows": lambda x, i: x.t().index_select(0, i),
    "embedding": lambda x, i: torch.embedding(x, i),
    "add to an empty row": lambda x, i: x[0].index_add(0, i, torch.ones(1, device=x.device)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_bounds_where_slices_have_no_elements(name: str) -> None:
    """Some of the CPU's kernels look at indices that nothing is read or written by, others don't."""
    hosts = torch.zeros(3, 0), torch.tensor([6])
    outcomes = []
    for device in ("cpu", "tpu"):
        try:
            outcomes.append(NOTHING[name](*(t.to(device) for t in hosts)))
        except (IndexError, RuntimeError) as error:
            outcomes.append((type(error).__name__, str(error)))
    assert_same(outcomes[1], outcomes[0])
