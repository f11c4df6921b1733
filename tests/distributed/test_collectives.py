"""Each collective of `torch.distributed` gives on the device what gloo gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import World

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
MOVED = [*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]


def operand(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers, different on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def same(function: Any, *args: Any) -> list[Any]:
    """What a function of a device gives on the CPU and on the device, which must be equal."""
    cpu, tpu = function("cpu", *args), function("tpu", *args)
    assert len(cpu) == len(tpu)
    for a, b in zip(cpu, tpu, strict=True):
        assert b.device.type == "tpu"
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.to(torch.float64) if a.dtype.itemsize == 1 else a, _comparable(b)), (a, b)
    return [t.tolist() if t.dtype.itemsize > 1 and not t.is_complex() else [] for t in cpu]


def _comparable(t: torch.Tensor) -> torch.Tensor:
    t = t.cpu()
    return t.to(torch.float64) if t.dtype.itemsize == 1 else t


def reduced(device: str, dtype: torch.dtype, op: Any) -> list[torch.Tensor]:
    x = operand(dtype, 4, 6).to(device)
    whole, part, row = x.clone(), x.clone(), x.clone()
    dist.all_reduce(whole, op)
    piece = part[1:3, ::2] if device == "tpu" else part[1:3, ::2].contiguous()
    dist.all_reduce(piece, op)
    if device == "cpu":
        part[1:3, ::2] = piece
    dist.reduce(row, 1, op)
    scattered = torch.empty(2, 6, dtype=dtype, device=device)
    dist.reduce_scatter_single(scattered, x.clone(), op)
    listed = torch.empty(2, 6, dtype=dtype, device=device)
    dist.reduce_scatter(listed, list(x.clone().chunk(2)), op)
    return [whole, part, scattered, listed, *([row] if dist.get_rank() == 1 else [])]


def check_reductions(dtypes: list[torch.dtype], ops: list[str]) -> None:
    for dtype in dtypes:
        for op in ops:
            same(reduced, dtype, getattr(dist.ReduceOp, op))


def test_reductions_of_floats(two: World) -> None:
    two.run(check_reductions, FLOATS, ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])


def test_reductions_of_integers(two: World) -> None:
    two.run(check_reductions, INTEGERS, ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])


def check_other_reductions() -> None:
    both = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    own = both[dist.get_rank()].to("tpu")
    for op, expected in (("SUM", both.any(0)), ("PRODUCT", both.all(0)), ("BXOR", both[0] ^ both[1])):
        x = own.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert torch.equal(x.cpu(), expected), op
    for dtype in (torch.int16, torch.uint16, torch.uint32):
        x = torch.full((3,), 30000 + dist.get_rank(), dtype=torch.int64).to(dtype).to("tpu")
        expected = (torch.arange(2).view(2, 1) + 30000).sum(0).to(dtype).expand(3)
        dist.all_reduce(x)
        assert torch.equal(x.cpu(), expected), dtype
    x = torch.full((3,), 1.5, device="tpu") + dist.get_rank()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [2.0] * 3
    x = torch.full((3,), 1 + 2j, device="tpu") * (dist.get_rank() + 1)
    dist.all_reduce(x)
    assert x.tolist() == [3 + 6j] * 3
    for dtype, op in ((torch.int64, "AVG"), (torch.float32, "BAND"), (torch.uint64, "SUM")):
        with pytest.raises(RuntimeError, match=f"there is no {op} of"):
            dist.all_reduce(torch.ones(2, dtype=torch.float32).to(dtype).to("tpu"), getattr(dist.ReduceOp, op))
    x = torch.ones(2, device="tpu")
    dist.all_reduce(x)  # a refused call has not come between
    assert x.tolist() == [2.0, 2.0]


def test_bool_short_integers_premultiplied_sums_and_what_is_refused(two: World) -> None:
    two.run(check_other_reductions)


def moved(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    rank = dist.get_rank()

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device).to(dtype)

    x = operand(dtype, 4, 3).to(device)
    from_one, gathered = x.clone(), empty(8, 3)
    dist.broadcast(from_one, 1)
    dist.all_gather_single(gathered, x)
    listed = [empty(4, 3) for _ in range(2)]
    dist.all_gather(listed, x)
    on_root = [empty(4, 3) for _ in range(2)] if rank == 0 else None
    dist.gather(x, on_root, 0)
    scattered = empty(4, 3)
    dist.scatter(scattered, [x, operand(dtype, 4, 3, seed=1).to(device)] if rank == 1 else None, 1)
    exchanged = empty(4, 3)
    dist.all_to_all_single(exchanged, x)
    sent = [1, 3] if rank == 0 else [2, 2]
    received = [[1, 2], [3, 2]][rank]
    uneven = empty(sum(received), 3)
    dist.all_to_all_single(uneven, x, received, sent)
    return [from_one, gathered, *listed, *(on_root or []), scattered, exchanged, uneven]


def check_moves() -> None:
    for dtype in MOVED:
        if dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64):  # not gloo's: as another one
            for a, b in zip(moved("cpu", torch.float32), moved("tpu", dtype), strict=True):
                assert torch.equal(a, b.cpu().real.float() if dtype.is_complex else b.cpu().float()), dtype
        else:
            same(moved, dtype)


def test_collectives_that_move_every_dtype(two: World) -> None:
    two.run(check_moves)


def check_lists() -> None:
    rank = dist.get_rank()
    uneven = [torch.zeros(2 + n, 2, device="tpu") for n in range(2)]
    dist.all_gather(uneven, torch.full((2 + rank, 2), float(rank + 1), device="tpu"))
    assert [t.tolist() for t in uneven] == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 3]
    outs = [torch.zeros(3, device="tpu"), torch.zeros(1, 2, device="tpu")]
    sent = [torch.full(shape, 10.0 * rank + n, device="tpu") for n, shape in enumerate([(3,), (1, 2)])]
    outs = [torch.zeros(sent[rank].shape, device="tpu") for _ in range(2)]
    dist.all_to_all(outs, sent)
    assert [t.flatten()[0].item() for t in outs] == [float(rank), 10.0 + rank]
    parts = [torch.full((n + 1,), 1.0 + rank, device="tpu") for n in range(2)]
    out = torch.zeros(rank + 1, device="tpu")
    dist.reduce_scatter(out, parts)
    assert out.tolist() == [3.0] * (rank + 1)
    empty = torch.zeros(0, 4, device="tpu")
    dist.all_reduce(empty)
    dist.all_gather_single(torch.zeros(0, 4, device="tpu"), empty)
    number = torch.tensor(1.0 + rank, device="tpu")
    dist.all_reduce(number)
    assert number.item() == 3.0
    both = torch.zeros(2, device="tpu")
    dist.all_gather_single(both, number)
    assert both.tolist() == [3.0, 3.0]


def test_uneven_lists_empty_tensors_and_numbers(two: World) -> None:
    two.run(check_lists)


def check_coalesced() -> None:
    rank = dist.get_rank()
    x, y = (torch.full((n,), 1.0 + rank, device="tpu") for n in (2, 3))
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert x.tolist() + y.tolist() == [3.0] * 5
    outs = [torch.zeros(2 * n, device="tpu") for n in (2, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_single(outs[0], x + rank)
        dist.all_gather_single(outs[1], y + rank)
    manager.wait()
    assert [o.tolist() for o in outs] == [[3.0] * n + [4.0] * n for n in (2, 3)]
    parts = [torch.zeros(n, device="tpu") for n in (2, 3)]
    with dist._coalescing_manager():
        for part, out in zip(parts, outs, strict=True):
            dist.reduce_scatter_single(part, out)
    assert [p.tolist() for p in parts] == [[2 * (3.0 + rank)] * n for n in (2, 3)]
    with dist._coalescing_manager(device=torch.device("tpu")):
        dist.all_reduce_coalesced([x, y])


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
def test_coalesced_collectives(two: World) -> None:
    two.run(check_coalesced)


def check_views() -> None:
    """What is written is a part of a storage; the rest of it keeps its elements, old readers keep the old value."""
    rank = dist.get_rank()
    whole = torch.arange(12.0, device="tpu").view(3, 4)
    old, column = whole.clone(), whole[:, 1]
    dist.all_reduce(column)
    dist.broadcast(whole[2], 0)
    whole[0, 0] = 100.0
    expected = torch.arange(12.0).view(3, 4)
    expected[:, 1] *= 2
    expected[0, 0] = 100.0
    assert torch.equal(whole.cpu(), expected)
    assert torch.equal(old.cpu(), torch.arange(12.0).view(3, 4))
    pieces = torch.zeros(2, 5, device="tpu")
    dist.all_gather(list(pieces.unbind()), torch.arange(5.0, device="tpu") + rank)
    assert pieces.tolist() == [[0.0, 1, 2, 3, 4], [1.0, 2, 3, 4, 5]]
    fortran = torch.zeros(3, 2, device="tpu").t()
    dist.all_gather_single(fortran, torch.arange(3.0, device="tpu").view(1, 3) + rank)
    assert fortran.tolist() == [[0.0, 1, 2], [1.0, 2, 3]]
    x = torch.ones(1000, device="tpu")
    before = x.clone()
    dist.all_reduce(x)
    x += 1  # while `before` still has the old value
    assert before.sum().item() == 1000.0
    assert x.sum().item() == 3000.0
    version = x._version
    dist.all_reduce(x)
    assert x._version == version


def test_views_and_their_storages(two: World) -> None:
    two.run(check_views)


def check_again() -> None:
    """The same calls with other data, offsets and in-place writes between."""
    rank = dist.get_rank()
    store = torch.arange(40.0, device="tpu") * (rank + 1)
    host = torch.arange(40.0)
    expected = [host, host * 2]
    for n in range(6):
        view = store[n * 3 : n * 3 + 8]
        dist.all_reduce(view)
        total = expected[0][n * 3 : n * 3 + 8] + expected[1][n * 3 : n * 3 + 8]
        for e in expected:
            e[n * 3 : n * 3 + 8] = total
        store.mul_(0.5)
        expected = [e * 0.5 for e in expected]
    assert torch.equal(store.cpu(), expected[rank])
    works = []
    tensors = [torch.full((50_000 * (n % 2) + 3,), float(n + rank), device="tpu") for n in range(12)]
    for t in tensors:
        t += 1
        works.append(dist.all_reduce(t, async_op=True))
    for n, (t, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert (t * 2).min().item() == (t * 2).max().item() == 2.0 * (2 * n + 3)


def test_many_calls_in_order(two: World) -> None:
    two.run(check_again)
