"""Steps that are mostly wrong: in dtypes, shapes, numbers and indices, or in writing what they read.

What the CPU refuses is to be refused, and to leave every tensor as it was; what it accepts is a step like others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tools.random_programs.draft import Draft, NoChoice, has_dims, has_elements, is_float, is_real, separate, writable
from tools.random_programs.kinds import Draw, kind
from tools.random_programs.leaves import dtype, values
from tools.random_programs.program import execute

# Drawers whose refused lines are kept, whatever their share.
WRONG: set[str] = set()


def wrong(weight: float, *, exact: bool = False) -> Callable[[Draw], Draw]:
    """Registers a drawer of lines that are mostly wrong."""

    def register(draw: Draw) -> Draw:
        WRONG.add(draw.__name__)
        return kind(weight, exact=exact)(draw)

    return register


def _vector(draft: Draft, low: int, high: int) -> str:
    """Integers as an index tensor, some of a dtype that is none."""
    of = draft.rng.choices([torch.int64, torch.int32, torch.int16, torch.float32, torch.bool], [8, 2, 1, 1, 1])[0]
    numbers = [draft.rng.randrange(low, high) for _ in range(2)]
    return f"torch.tensor({numbers}, device=device).to({of})"


@wrong(1.5)
def mixed_dtypes(draft: Draft) -> str:
    x = draft.pick(has_dims(1), has_elements, is_real)
    y = f"{x}.detach().to({dtype(draft)})"
    size = draft[x].shape[-1]
    forms = [
        "torch.nn.functional.linear({x}, {y}.reshape(-1, {size}))",
        "torch.matmul({x}, {y}.mT)" if draft[x].dim() > 1 else "torch.dot({x}, {y})",
        "torch.nn.functional.mse_loss({x}, {y})",
        "torch.lerp({x}, {y}, 0.5)",
        "torch.nn.functional.layer_norm({x}, [{size}], {y}.reshape(-1)[:{size}])",
        "{x}.index_copy(0, torch.tensor([0], device=device), {y}[:1])",
        "{x}.index_put((torch.tensor([0], device=device),), {y}[:1])",
        "{x}.masked_scatter({x} > 0, {y})",
        "torch.addcmul({x}, {y}, {y}, value=2)",
        "torch.bitwise_and({x}, {y})",
        "{x}.scatter(0, torch.zeros_like({x}[:1], dtype=torch.int64), {y})",
    ]
    return f"{draft.new()} = {draft.choice(forms).format(x=x, y=y, size=size)}"


@wrong(1.5)
def shapes(draft: Draft) -> str:
    x, y = draft.pick(has_dims(1)), draft.pick(has_dims(1))
    d = draft.choice([-7, -4, 3, 5, 9])
    forms = [
        f"{x} @ {y}",
        f"{x} + {y}",
        f"torch.cat([{x}, {y}])",
        f"torch.stack([{x}, {y}])",
        f"{x}.view(7)",
        f"{x}.reshape(-1, 7)",
        f"{x}.expand(5, 7)",
        f"{x}.expand_as({y})",
        f"{x}.sum({d})",
        f"{x}.softmax({d})",
        f"{x}.unsqueeze({d})",
        f"{x}.transpose(0, {d})",
        f"{x}.permute(0, 0)",
        f"{x}.narrow(0, 1, 9)",
        f"{x}.select(0, {d})",
        f"{x}.split([1, 7])[0]",
        f"torch.where({x} > {y}, {x}, {y})" if is_real(draft[x]) and is_real(draft[y]) else f"{x} * {y}",
        f"torch.nn.functional.layer_norm({x}, [7])",
        f"{x}.topk(9)[0]",
        f"{x}.kthvalue(9)[0]",
    ]
    return f"{draft.new()} = {draft.choice(forms)}"


@wrong(1)
def shapes_of_writes(draft: Draft) -> str:
    x, y = draft.pick(has_dims(1), writable), draft.pick()
    forms = ["{x}.add_({y}.detach())", "{x}.copy_({y}.detach())", "{x}[0] = {y}.detach()", "{x}.mul_({x}[:, None])"]
    forms += ["{x}.masked_fill_({y} == {y}, 1)", "{x}.clamp_(max={y}.detach())", "{x}.fill_({y}.detach())"]
    return draft.choice(forms).format(x=x, y=y)


@wrong(2)
def overlapping(draft: Draft) -> str:
    """A write that reads what it writes; where the CPU lets it pass, its result depends on the order of elements."""
    x = draft.pick(has_dims(1), has_elements, separate, lambda t: t.shape[0] > 1 and not t.requires_grad)
    zeros = f"torch.zeros_like({x}, dtype=torch.int64)"
    line = draft.choice(
        [
            f"{x}[1:].add_({x}[:-1])",
            f"{x}[:-1].copy_({x}[1:])",
            f"{x}[1:].mul_({x}[:-1])",
            f"torch.add({x}[1:], 1, out={x}[:-1])",
            f"{x}.scatter_(0, {zeros}, {x})",
            f"{x}.index_add_(0, torch.arange({x}.shape[0], device=device), {x})",
            f"{x}.index_copy_(0, torch.arange({x}.shape[0], device=device), {x})",
            f"{x}.index_put_((torch.arange({x}.shape[0], device=device),), {x})",
            f"torch.gather({x}, 0, {zeros}, out={x})",
            f"torch.index_select({x}, 0, torch.arange({x}.shape[0], device=device), out={x})",
            f"{x}.put_(torch.arange({x}.numel(), device=device).reshape({x}.shape), {x})",
            f"{x}.expand(2, *{x}.shape).add_(1)",
            f"torch.cumsum({x}[1:], 0, out={x}[:-1])",
        ]
    )
    if not _is_refused(draft, line):
        raise NoChoice
    return line


def _is_refused(draft: Draft, line: str) -> bool:
    scratch = dict(draft.names)
    scratch.update({n: t.detach().clone() for n, t in draft.names.items() if isinstance(t, torch.Tensor)})
    return execute(line, scratch) is not None


NUMBERS = ["300", "-1", "2.5", "True", "1e39", "-1e39", "nan", "inf", "1j", "2**40", "2**63"]


@wrong(2)
def numbers(draft: Draft) -> str:
    x = draft.pick(writable)
    v = draft.choice(NUMBERS)
    if draft.chance(0.5):
        return draft.choice(["{x}.fill_({v})", "{x}.add_({x}, alpha={v})", "{x}.masked_fill_({x} != {x}, {v})"]).format(
            x=x, v=v
        )
    forms = ["torch.add({x}, {x}, alpha={v})", "torch.sub({x}, 2, alpha={v})", "torch.full_like({x}, {v})"]
    forms += ["torch.addcmul({x}, {x}, {x}, value={v})", "{x}.clamp({v})", "{x}.clamp(max={v})"]
    forms += ["torch.nn.functional.softshrink({x}, {v})", "torch.nn.functional.threshold({x}, {v}, 0)", "{x} << {v}"]
    return f"{draft.new()} = {draft.choice(forms).format(x=x, v=v)}"


@wrong(1.5, exact=True)
def random_numbers(draft: Draft) -> str:
    """Never right: what is drawn would be another number on each device."""
    x = draft.pick(writable, has_elements, is_float)
    y = draft.pick(is_float, has_elements)
    lines = [
        "{x}.uniform_(2, 1)",
        "{x}.normal_(0, -1)",
        "{x}.exponential_(-1)",
        "{x}.geometric_(1.5)",
        "{x}.cauchy_(0, 0)",
        "{x}.log_normal_(0, -1)",
        "{x}.bernoulli_(1.5)",
        "{x}.bernoulli_({y}.detach().abs() + 1.5)",
        "{x}.random_(5, 3)",
        "torch.bernoulli(-1 - {y}.detach().abs())",
        "torch.poisson(-1 - {y}.detach().abs())",
        "torch.multinomial(-1 - {y}.detach().abs().reshape(-1), 1)",
        "torch.multinomial({y}.detach().reshape(-1) * 0, 1)",
        "torch.normal({y}.detach(), -1.0)",
        "torch.normal(0.0, -1 - {y}.detach().abs())",
        "torch.nn.functional.dropout({y}, 1.5)",
    ]
    return draft.choice(lines).format(x=x, y=y)


@wrong(2, exact=True)
def positions(draft: Draft) -> str:
    """Indices of which some are out of bounds, negative or of another dtype."""
    x = draft.pick(has_dims(1), separate)
    t = draft[x]
    n = t.shape[0]
    i = _vector(draft, -n - 2, n + 3)
    forms = [
        f"{x}.index_select(0, {i})",
        f"{x}[{i}]",
        f"{x}.take({i})",
        f"{x}.gather(0, {i}.reshape(2, *[1] * {t.dim() - 1}))",
        f"torch.nn.functional.embedding({i}, {x})",
        f"{x}.index_fill(0, {i}, 1)",
        f"{x}.index_copy(0, {i}, {x}[:2].detach())",
        f"{x}[{n + 2}]",
    ]
    if t.requires_grad or draft.chance(0.5):
        return f"{draft.new()} = {draft.choice(forms)}"
    writes = [
        f"{x}.index_fill_(0, {i}, 1)",
        f"{x}[{i}] = 1",
        f"{x}.index_put_(({i},), torch.ones((), dtype={x}.dtype, device=device))",
        f"{x}.scatter_(0, {i}.reshape(2, *[1] * {t.dim() - 1}), 1)",
        f"{x}.put_({i}, torch.ones(2, dtype={x}.dtype, device=device))",
        f"{x}.index_add_(0, {i}, torch.ones_like({x}[:2]))",
    ]
    return draft.choice(writes)


@wrong(1)
def results(draft: Draft) -> str:
    """`out=` of another dtype or shape."""
    x = draft.pick(lambda t: not t.requires_grad)
    of = dtype(draft)
    count = math.prod(draft[x].shape)
    fresh = draft.choice([f"torch.zeros_like({x}, dtype={of})", f"torch.tensor({values(draft, of, 3)}, device=device)"])
    forms = ["torch.add({x}, {x}, out={o})", "torch.mul({x}, 2, out={o})", "torch.sum({x}, 0, out={o})"]
    forms += ["torch.neg({x}, out={o})", "torch.cat([{x}], out={o})", "torch.abs({x}, out={o})"]
    forms += ["torch.cumsum({x}, 0, out={o})"] if count < 10 else []
    return f"{draft.new()} = {draft.choice(forms).format(x=x, o=fresh)}"
