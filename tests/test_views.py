"""Programs that read and write through views of views, other dtypes and shared storages, next to the CPU."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tools.compare import assert_same, check

Program = Callable[[str], Any]


def arange(device: str, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(n, dtype=dtype).to(device)


def complex_row(device: str) -> torch.Tensor:
    return torch.complex(arange(device, 4), arange(device, 4) + 1)


# --- views of another dtype --------------------------------------------------------------------------------------


def integers_in_floats(device: str) -> Any:
    x = arange(device, 8).reshape(2, 4)
    bits = x[:, 1:3].view(torch.int32)[1]
    bits.fill_(0x3F800000)
    return x, bits, x.t()[2:]


def bytes_in_floats(device: str) -> Any:
    x = arange(device, 3)
    b = x.view(torch.uint8)
    b[3] = 0xC0
    b[4:8] = 0
    return x, b


def bool_and_bytes(device: str) -> Any:
    x = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).to(device)
    flags = x.view(torch.bool)
    flags[0] = True
    flags.logical_not_()
    back = flags.view(torch.uint8)
    back[1] = 1
    return x, flags, back.sum()


def halves_in_words(device: str) -> Any:
    x = arange(device, 4, torch.bfloat16)
    x.view(torch.int16)[1] = x.view(torch.int16)[3]
    return x, x.view(torch.float32)


def complex_parts(device: str) -> Any:
    z = complex_row(device)
    z.real.mul_(2)
    z.imag[1:] = 0.5
    torch.view_as_real(z)[0, 1] = 9
    z.view(torch.float32)[::3] = -1
    w = complex_row(device)
    w.imag = arange(device, 4) * 3
    pairs = arange(device, 8).reshape(4, 2)
    torch.view_as_complex(pairs).mul_(1j)
    return z, w, pairs


def conjugates(device: str) -> Any:
    z = complex_row(device)
    c = z.conj()
    c[1] = 5 + 2j
    c.mul_(1j)
    c.imag.add_(1)
    c[2:].copy_(torch.full((2,), 2 + 1j, device=device))
    out = torch.zeros(4, dtype=torch.complex64, device=device)
    torch.mul(z, 2, out=out.conj())
    return z, c.resolve_conj(), out, c.is_conj(), c.imag.is_neg(), (z.reshape(2, 2) @ z.reshape(2, 2).mH)


# --- storages ----------------------------------------------------------------------------------------------------


def set_shares(device: str) -> Any:
    x = arange(device, 12)
    y = torch.empty(0, device=device).set_(x.untyped_storage(), 2, (2, 3), (4, 1))
    y.add_(10)
    z = torch.zeros(2, device=device).set_(y)
    z.t().select(0, 1).zero_()
    return x, y, z, z.storage_offset(), x.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()


def resize(device: str) -> Any:
    x = arange(device, 6)
    alias = x[:]
    x.resize_(4)
    smaller = x.clone()
    x.resize_(2, 3).add_(1)
    part = alias[2:4]
    part.resize_(2, 2).add_(100)
    grown = arange(device, 4)
    grown.resize_(6)
    return x, alias, smaller, part, grown[:4], grown.shape


def storage_writes(device: str) -> Any:
    x, y = arange(device, 6), torch.zeros(6, device=device)
    y.untyped_storage().copy_(x.untyped_storage())
    x.add_(1)
    x.untyped_storage()[3] = 0x40
    return x, y, y.untyped_storage().tolist(), len(y.untyped_storage())


def swapped(device: str) -> Any:
    x, y = arange(device, 3), arange(device, 4) + 9
    view = x[1:]
    del view
    torch.utils.swap_tensors(x, y)
    x.add_(1)
    return x, y


def flat_parameters(device: str) -> Any:
    module = torch.nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(4.0).view(2, 2))
        module.bias.zero_()
    module = module.to(device)
    flat = torch.cat([p.data.view(-1) for p in module.parameters()])
    begin = 0
    for p in module.parameters():
        p.data = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
    flat.mul_(2)
    module(torch.ones(1, 2, device=device)).sum().backward()
    return flat, module.weight.detach(), module.bias.grad


# --- writes through views ----------------------------------------------------------------------------------------


def pieces(device: str) -> Any:
    x = arange(device, 12).reshape(3, 4)
    left, right = x.chunk(2, 1)
    left.add_(10)
    right[1].zero_()
    x.split([1, 2], 0)[1].mul_(2)
    x.unbind(1)[0].fill_(-1)
    x.hsplit(2)[1][:, 1].exp_()
    row = arange(device, 7)
    row.tensor_split(3)[1].neg_()
    return x, left, right, row


def diagonals_and_windows(device: str) -> Any:
    x = arange(device, 16).reshape(4, 4)
    x.diagonal(1)[1:].add_(100)
    x.fill_diagonal_(7)
    torch.diagonal(x, -2).copy_(torch.tensor([1.0, 2.0]))
    row = arange(device, 8)
    row.unfold(0, 2, 2)[:, 0].neg_()
    row.unfold(0, 3, 4).add_(1)
    overlapping = row.as_strided((4, 3), (1, 1))
    row[2] = 50
    return x, row, overlapping, overlapping.sum(1), overlapping @ overlapping.t()


def permuted(device: str) -> Any:
    x = arange(device, 24).reshape(2, 3, 4)
    view = x.movedim(0, -1)[1:, ::2]
    view[..., 1] = -1
    view.transpose(0, 2).select(0, 0).mul_(2)
    y = arange(device, 6).reshape(2, 3)
    y.t_()
    y[0] = 5
    y.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    return x, view, y


def reversed_copies(device: str) -> Any:
    x = arange(device, 6)
    y = x.flip(0)
    y[0] = 50
    x[:] = x.flip(0)
    negated = torch._neg_view(x)
    negated[1:].add_(1)
    return x, y, y.flip(0)[::2], negated.resolve_neg(), negated.sum()


def expanded(device: str) -> Any:
    x = torch.ones(1, 3, device=device)
    x.expand(4, 3).fill_(2)
    rows = arange(device, 12).reshape(4, 3)
    rows[1:, None, :, None].expand(3, 2, 3, 2)[1].zero_()
    x.expand(2, 3)[0].mul_(torch.tensor([1.0, 2.0, 3.0]).to(device))
    e = x.expand(4, 3)
    return x, rows, e.sum(0), e.t() @ e, e.clone().stride(), (e + 1).stride(), e.reshape(-1)


def nothing(device: str) -> Any:
    x = torch.zeros(0, 3, device=device)
    x.add_(1)
    x[:] = 5
    x.t().mul_(2)
    tail = arange(device, 4)[2:2]
    tail.fill_(3)
    tail.add_(tail)
    end = arange(device, 4).as_strided((0,), (1,), 3)
    return x, tail, tail.storage_offset(), end, x.expand(0, 3), x.unsqueeze(0).expand(4, 0, 3), x.view(torch.int32)


def zero_dimensional(device: str) -> Any:
    x = torch.tensor(3.0).to(device)
    x.view(1).add_(1)
    x.unsqueeze(0).unsqueeze(0).sub_(0.5)
    row = arange(device, 4)
    element = row[2]
    element.add_(10)
    row[torch.tensor(1).to(device)] = 99
    row[0:1].fill_(row[3])
    row[torch.tensor(False).to(device)] = 7
    return x, row, element, x.item(), row[torch.tensor(True).to(device)]


def assignments(device: str) -> Any:
    x = arange(device, 24).reshape(2, 3, 4)
    x[..., 0] = 1
    x[0, :, None, 1] = torch.tensor([[5.0]]).to(device)
    x[1, 1:, ::3] = arange(device, 4).view(2, 2)
    x[:, [0, 2], 1] = -4
    x[x > 20] = 0
    x[None] = x[None] + 1
    x[torch.tensor([0, 1]).to(device), torch.tensor([1, 2]).to(device)] *= 2
    x[:1] = torch.ones(1, 1, 3, 4, device=device)
    return x


def host_scalars(device: str) -> Any:
    x, n = arange(device, 3), arange(device, 3, torch.int32)
    h, d, i = torch.tensor(2.0), torch.tensor(3, dtype=torch.float64), torch.tensor(2)
    written = arange(device, 3)
    written.add_(h).mul_(i)
    written -= d
    written[0] = torch.tensor(7)
    written[1:] = torch.tensor(8.0)
    written.masked_fill_(written > 7, torch.tensor(0.0))
    half = arange(device, 3, torch.bfloat16)
    results = [x + h, h + x, x * d, d * x, x**i, i - x, x > h, h > x, x.clamp(max=h), torch.pow(h, x), i / (x + 1)]
    results += [torch.where(x > 1, h, x), torch.where(x > 1, x, h), n + torch.tensor(1.5), i // (n + 1), n & i, i << n]
    return [*results, half + d, half * i, half > i, written]


def foreach_over_views(device: str) -> Any:
    x = arange(device, 8)
    torch._foreach_add_([x[:3], x[3:5], x[5:]], 1.0)
    torch._foreach_mul_([x[:3], x[::2]], [2.0, 3.0])
    return x


def out_views(device: str) -> Any:
    x, out = arange(device, 6), torch.zeros(12, device=device)
    torch.exp(x, out=out[::2])
    torch.cumsum(x, 0, out=out[1::2])
    base = torch.zeros(8, device=device)
    empty = base[:0]
    torch.add(torch.ones(3, device=device), 1, out=empty)
    return out, empty, base


def scattered(device: str) -> Any:
    x = arange(device, 6)
    return (
        torch.as_strided_scatter(x, torch.ones(2, 2, device=device), (2, 2), (3, 1), 1),
        torch.slice_scatter(x, torch.ones(3, device=device), 0, 0, 6, 2),
        torch.diagonal_scatter(x.view(2, 3), torch.zeros(2, device=device)),
        x,
    )


def gradients(device: str) -> Any:
    x = arange(device, 6).requires_grad_()
    y = x * 2
    y.view(2, 3)[:, 1].mul_(3)
    y[0] = 1
    y.view(2, 3).t()[2].exp_()
    windows = (x.as_strided((4, 3), (1, 1)) * torch.arange(12.0).view(4, 3).to(device)).sum()
    z = torch.view_as_complex(x.view(3, 2))
    (y.sum() + windows + (z * z.conj()).real.sum()).backward()
    return y.detach(), x.grad, y._version, y.view(-1)._base is y


def layouts(device: str) -> Any:
    x = arange(device, 24).reshape(2, 3, 4)
    parts = (x, x.mT, x[1], x[:, 1], x[:1], x[..., :1], x.permute(2, 0, 1))
    nhwc = x.view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    nhwc[0, 1] = 0
    strides = [nhwc.stride(), nhwc.clone(memory_format=torch.contiguous_format).stride()]
    strides += [p.contiguous().stride() for p in parts]
    nbytes = [x[:, ::2].nbytes, x[1].data_ptr() - x.data_ptr(), x[1].untyped_storage().nbytes()]
    return [p.is_contiguous() for p in parts], strides, nbytes, x, nhwc


PROGRAMS: list[Program] = [
    integers_in_floats, bytes_in_floats, bool_and_bytes, halves_in_words, complex_parts, conjugates, set_shares, resize,
    storage_writes, swapped, flat_parameters, pieces, diagonals_and_windows, permuted, reversed_copies, expanded,
    nothing, zero_dimensional, assignments, host_scalars, foreach_over_views, out_views, scattered, gradients, layouts,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program(program: Program) -> None:
    got, want = program("tpu"), program("cpu")
    assert_same(got, want)


# --- wrong use ---------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "write to an expanded tensor": lambda x: x[:1].expand(4, 6).add_(1),
    "copy to an expanded tensor": lambda x: x[:1].expand(4, 6).copy_(torch.ones(4, 6, device=x.device)),
    "in place on an expanded view": lambda x: x[:1].expand(4, 6).mul_(x[:1].expand(4, 6) * 2),
    "operand that overlaps the target": lambda x: x[1:].add_(x[:3]),
    "the same memory in another order": lambda x: x.view(-1)[:4].view(2, 2).mul_(x.view(-1)[:4].view(2, 2).t()),
    "the same memory as another dtype": lambda x: x.view(torch.int32)[0].add_(x[0].view(torch.int16)[:6]),
    "copy within a tensor": lambda x: x[1:].copy_(x[:3]),
    "rows from the same memory": lambda x: x.index_copy_(0, torch.tensor([0, 1], device=x.device), x[1:3]),
    "out= that overlaps an operand": lambda x: torch.sin(x[1:], out=x[:3]),
    "out= of a scan that overlaps": lambda x: torch.cumsum(x[1:], 0, out=x[:3]),
    "out= of a join that overlaps": lambda x: torch.cat([x[:1], x[1:3]], out=x[1:]),
    "out= inside the operand": lambda x: torch.index_select(x, 0, torch.tensor([3], device=x.device), out=x[:1]),
    "random numbers in an expanded tensor": lambda x: x[:1].expand(4, 6).uniform_(),
    "float into integers": lambda x: x.view(torch.int32).mul_(1.5),
    "float into integers of a list": lambda x: torch._foreach_mul_([x.view(torch.int32)], 1.5),
    "complex into floats": lambda x: x.add_(1j),
    "a complex tensor into floats": lambda x: x.mul_(torch.ones(6, dtype=torch.complex64, device=x.device)),
    "subtraction of bool": lambda x: x.sub_(True),
    "a number too large": lambda x: x.view(torch.int8).fill_(300),
    "a mask value too low": lambda x: x.view(torch.float16).masked_fill_(x.view(torch.float16) > 0, -1e9),
    "index_copy_ of another dtype": lambda x: x.index_copy_(0, torch.zeros(1, dtype=torch.long, device=x.device),
                                                           torch.ones(1, 6, dtype=torch.long, device=x.device)),
    "put_ of another dtype": lambda x: x.put_(torch.zeros(1, dtype=torch.long, device=x.device),
                                              torch.ones(1, dtype=torch.long, device=x.device)),
    "broadcast of the target": lambda x: x[0].add_(torch.ones(4, 6, device=x.device)),
    "copy of another shape": lambda x: x.copy_(torch.zeros(5, device=x.device)),
    "host copy of another shape": lambda x: x.copy_(torch.zeros(5)),
    "assignment of another shape": lambda x: x[:2].__setitem__(slice(None), torch.zeros(3, 6)),
    "view of a transposed tensor": lambda x: x.t().view(-1),
    "wider dtype at an odd offset": lambda x: x.view(-1)[1:].view(torch.float64),
    "wider dtype of an odd size": lambda x: x.view(-1)[:3].view(torch.float64),
    "strides beyond the storage": lambda x: x[0].detach().clone().as_strided((3,), (4,)),
    "negative strides": lambda x: x.as_strided((3,), (-1,), 3),
    "imaginary part of floats": lambda x: x.imag,
    "float as an index": lambda x: x[torch.tensor([1.0], device=x.device)],
    "row beyond the end": lambda x: x[4],
    "set_ of another dtype": lambda x: torch.empty(0, dtype=torch.int32, device=x.device).set_(x),
    "out of another dtype": lambda x: torch.add(x, 1, out=torch.zeros(3, dtype=torch.int64, device=x.device)),
    "in place on a leaf": lambda x: x.clone().requires_grad_()[0].add_(1),
    "in place on one of several views": lambda x: (x.clone().requires_grad_() * 1).chunk(2)[0].mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_raises_as_on_the_cpu_and_writes_nothing(name: str) -> None:
    host = torch.arange(24.0).reshape(4, 6)
    x = host.to("tpu")
    errors = (RuntimeError, TypeError, IndexError)
    with pytest.raises(errors) as known:
        WRONG[name](host.clone())
    with pytest.raises(errors) as raised:
        WRONG[name](x)
    assert raised.type is known.type
    assert str(raised.value).splitlines()[0] == str(known.value).splitlines()[0]
    assert torch.equal(x.cpu(), host)


# --- random chains -----------------------------------------------------------------------------------------------


def _views(rng: random.Random, t: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    choices: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: x.unsqueeze(0), lambda x: x.squeeze()]
    if t.dim():
        d = rng.randrange(t.dim())
        begin = rng.randint(0, t.shape[d])
        end, step = rng.randint(begin, t.shape[d]), rng.randint(1, 3)
        order = rng.sample(range(t.dim()), t.dim())
        choices += [
            lambda x: x[(slice(None),) * d + (slice(begin, end, step),)],
            lambda x: x.permute(order),
            lambda x: x.chunk(2, d)[-1],
        ]
        if t.shape[d]:
            index, size = rng.randrange(t.shape[d]), rng.randint(1, t.shape[d])
            choices += [lambda x: x.select(d, index), lambda x: x.unfold(d, size, step)]
        if t.dim() > 1:
            choices.append(lambda x: x.diagonal(0, 0, -1))
        if t.dtype is torch.float32 and t.stride(-1) == 1:
            choices += [lambda x: x.view(torch.int32), lambda x: x.view(torch.int16)]
        if t.dtype is torch.int32:
            choices.append(lambda x: x.view(torch.float32))
    if t.is_complex():
        choices += [lambda x: x.real, lambda x: x.imag, lambda x: x.conj(), lambda x: torch.view_as_real(x)]
    return choices


def _writes(rng: random.Random) -> list[Callable[[torch.Tensor], Any]]:
    number = rng.randint(1, 5)

    def count(x: torch.Tensor) -> None:
        x.copy_(torch.arange(x.numel()).reshape(x.shape).to(x.dtype).to(x.device))

    return [
        lambda x: x.fill_(number),
        lambda x: x.add_(number),
        lambda x: x.zero_(),
        lambda x: x.mul_(x),
        lambda x: x.copy_(torch.arange(x.numel()).reshape(x.shape)),
        lambda x: torch.add(x.clone(), 1, out=x),
        count,
    ]


def _overlaps(t: torch.Tensor) -> bool:
    offsets = [
        sum(i * s for i, s in zip(index, t.stride(), strict=True)) for index in itertools.product(*map(range, t.shape))
    ]
    return len(set(offsets)) < len(offsets)


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_of_views_and_writes(seed: int) -> None:
    rng = random.Random(seed)
    bases = [torch.arange(24.0).reshape(2, 3, 4), torch.arange(24, dtype=torch.int32).reshape(4, 6).t().contiguous()]
    bases += [torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2)), torch.arange(24.0).reshape(2, 3, 2, 2)]
    host = [bases[seed % len(bases)]]
    device = [host[0].clone().to("tpu")]
    for _ in range(8):
        at = rng.randrange(len(host))
        if rng.random() < 0.6:
            function = rng.choice(_views(rng, host[at]))
            try:
                host.append(function(host[at]))
            except RuntimeError as known:
                # A layout that this dtype does not fit.
                with pytest.raises(type(known)):
                    function(device[at])
                continue
            device.append(function(device[at]))
        elif not _overlaps(host[at]):
            write = rng.choice(_writes(rng))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.add(out=) of a conjugate tells of its copy
                write(host[at])
                write(device[at])
        for got, want in zip(device, host, strict=True):
            assert got.storage_offset() == want.storage_offset()
            assert_same(got.resolve_conj(), want.resolve_conj(), strides=False)
            assert got.stride() == want.stride()


def test_what_overlaps_without_harm() -> None:
    """An expanded tensor copied to itself, neighbours in one storage, operands with gaps, a tensor with itself."""

    def run(x: torch.Tensor) -> Any:
        wide = x[:1].expand(4, 6)
        wide.copy_(wide)
        x[:2].add_(x[2:])
        x[:, 0].mul_(x[:, 1])
        x.add_(x)
        torch.mul(x, x, out=x)
        return x, x[:2].view(torch.int32).bitwise_and_(x[2:].view(torch.int32))

    check(run, torch.arange(24.0).reshape(4, 6))


def test_a_view_without_elements_has_its_own_dtype() -> None:
    def run(x: torch.Tensor) -> Any:
        narrow, none = x.view(torch.int16), x[:0].view(torch.float32)
        narrow[None, [5], 1:] = narrow[None, [5], 1:].clone()
        filled = narrow.index_fill(2, torch.tensor([0], device=x.device), 3)
        return narrow + 1, filled, none * 2.5, x[:0].view(torch.bool)

    check(run, torch.zeros(2, 0, 2, dtype=torch.int64))


def test_in_place_computes_in_the_promoted_dtype() -> None:
    """A narrow target takes the result, not the operands."""
    wide = torch.tensor([300, 7])
    for name in ("floor_divide_", "remainder_", "clamp_max_", "gt_", "add_"):
        check(lambda x, y, name=name: getattr(x, name)(y), torch.tensor([200, 20], dtype=torch.uint8), wide)
    check(lambda x, y: x.div_(y), torch.tensor([1e-3]), torch.tensor([3.0], dtype=torch.float64))
