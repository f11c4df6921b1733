"""Steps that index: integers, slices, None, Ellipsis, lists, tensors and masks, to read and to write."""

from __future__ import annotations

import torch

from tools.random_programs.draft import Draft, has_dims, has_elements, separate, share_memory
from tools.random_programs.kinds import kind
from tools.random_programs.leaves import literal, number


def index(draft: Draft, t: torch.Tensor, *, advanced: bool) -> str:
    """What stands between the brackets.

    Args:
        advanced: with lists, tensors and masks, of which no two name the same element.
    """
    entries = []
    given = draft.rng.randrange(1, t.dim() + 1) if t.dim() else 0
    length = None
    for size in t.shape[:given]:
        if advanced and size and draft.chance(0.6):
            entry, length = _advanced(draft, size, length)
        else:
            entry = _basic(draft, size)
        entries.append(entry)
    if draft.chance(0.2):
        entries.insert(draft.rng.randrange(len(entries) + 1), "None")
    if draft.chance(0.15):
        entries.append("...")
    if given == t.dim() == 1 and draft.chance(0.2):
        entries.insert(0, "...")
    return ", ".join(entries) if entries else "..."


def _basic(draft: Draft, size: int) -> str:
    rng = draft.rng
    if draft.chance(0.3):
        # Now and then outside.
        return str(rng.randrange(-size, size) if size and not draft.chance(0.08) else size + 2)
    start = draft.choice(["", "", "1", "-2", str(size // 2), "0"])
    stop = draft.choice(["", "", "", "-1", str(size), str(size + 5), "1"])
    step = draft.choice(["", "", "", ":2", ":3"])
    return f"{start}:{stop}{step}"


def _advanced(draft: Draft, size: int, length: int | None) -> tuple[str, int]:
    """A list or tensor of positions; several in one index have the same length."""
    count = length if length is not None else draft.rng.randrange(1, min(size, 3) + 1)
    if count > size:
        return str(draft.rng.randrange(size)), count
    places = [p - draft.choice([0, size]) for p in draft.rng.sample(range(size), count)]
    if draft.chance(0.25):
        mask = [i in {p % size for p in places} for i in range(size)]
        return f"torch.tensor({mask}, device=device)", count
    if draft.chance(0.1):
        places[0] = size + 3
    dtype = draft.choice(["torch.int64", "torch.int64", "torch.int32"])
    return draft.choice([str(places), f"torch.tensor({places}, dtype={dtype}, device=device)"]), count


@kind(4, exact=True)
def take(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    return f"{draft.new()} = {x}[{index(draft, draft[x], advanced=True)}]"


@kind(2, exact=True)
def take_mask(draft: Draft) -> str:
    """By a condition on the tensor's own elements."""
    x = draft.pick(lambda t: draft.away(t, 0), lambda t: not t.is_complex())
    mask = draft.choice([f"{x} > 0", f"{x} != 0", f"~({x} <= 0)"] + [f"({x} > 0).flip(0)"] * (draft[x].dim() > 0))
    form = draft.choice(["{x}[{m}]", "{x}.masked_select({m})", "torch.nonzero({m})", "torch.where({m})[0]"])
    return f"{draft.new()} = {form.format(x=x, m=mask)}"


@kind(3, exact=True)
def gather(draft: Draft) -> str:
    x = draft.pick(has_dims(1), has_elements)
    d = draft.dim(x)
    size = draft[x].shape[d]
    places = [draft.rng.randrange(size) for _ in range(2)]
    if draft.chance(0.05):
        places[1] = size
    at = f"torch.tensor({places}, device=device)"
    shape = [1] * draft[x].dim()
    shape[d] = 2
    full = list(draft[x].shape)
    full[d] = 2
    return f"{draft.new()} = " + draft.choice(
        [
            f"{x}.index_select({d}, {at})",
            f"{x}.take_along_dim({at}.reshape({shape}), {d})",
            f"{x}.gather({d}, {at}.reshape({shape}).expand({full}))",
            f"{x}.take({at})",
        ]
    )


def _source(draft: Draft, x: str, at: str) -> str:
    """Something that may be written to `x[at]`."""
    part = draft.evaluate(f"{x}[{at}]")
    others = [
        number(draft, part.dtype),
        literal(draft, (), part.dtype),
        f"{x}[{at}].clone()",
        f"torch.ones_like({x})[{at}]",
    ]
    if 0 < part.numel() <= 24:
        others.append(literal(draft, tuple(part.shape), part.dtype))
    return draft.choice(others + _fitting(draft, draft[x], part))


def _fitting(draft: Draft, x: torch.Tensor, part: torch.Tensor) -> list[str]:
    """Other tensors of the draft that can be written to a part of one, and share no memory with it."""
    return [
        name
        for name, t in draft.names.items()
        if isinstance(t, torch.Tensor)
        and (t.shape == part.shape or t.shape == part.shape[1:])
        and not share_memory(t, x)
        and torch.promote_types(t.dtype, part.dtype) is part.dtype
    ]


@kind(5, exact=True)
def set_slice(draft: Draft) -> str:
    x = draft.pick(separate, has_dims(1))
    at = index(draft, draft[x], advanced=False)
    source = _source(draft, x, at)
    return f"{x}[{at}] = {source}"


@kind(4, exact=True)
def set_places(draft: Draft) -> str:
    x = draft.pick(separate, has_dims(1))
    at = index(draft, draft[x], advanced=True)
    return f"{x}[{at}] = {_source(draft, x, at)}"


@kind(2)
def set_mask(draft: Draft) -> str:
    x = draft.pick(separate, lambda t: draft.away(t, 0), lambda t: not t.is_complex())
    value = number(draft, draft[x].dtype)
    forms = ["{x}[{x} > 0] = {v}", "{x}.masked_fill_({x} < 0, {v})", "{x}[{x} > 0] *= 2", "{x}[{x} < 0] += 1"]
    return draft.choice(forms).format(x=x, v=value)


@kind(2)
def put(draft: Draft) -> str:
    """The named operators that write at places, with and without accumulation."""
    x = draft.pick(separate, has_dims(1), has_elements)
    d = draft.dim(x)
    t = draft[x]
    size = t.shape[d]
    count = draft.rng.randrange(1, min(size, 3) + 1)
    places = draft.rng.sample(range(size), count)
    at = f"torch.tensor({places}, device=device)"
    piece = f"torch.ones_like({x}).narrow({d}, 0, {count})"
    shape, full = [1] * t.dim(), list(t.shape)
    shape[d], full[d] = count, count
    everywhere = f"{at}.reshape({shape}).expand({full})"
    twice = f"torch.tensor({[places[0]] * 2}, device=device)"
    forms = [
        f"{x}.index_copy_({d}, {at}, {piece})",
        f"{x}.index_fill_({d}, {at}, 2)",
        f"{x}.index_add_({d}, {at}, {piece})",
        f"{x}.scatter_({d}, {everywhere}, 3)",
        f"{x}.scatter_({d}, {everywhere}, {piece})",
        f"{x}.scatter_add_({d}, {everywhere}, {piece})",
    ]
    if t.dim() == 1:
        forms += [
            f"{x}.index_put_(({at},), {piece})",
            f"{x}.index_put_(({twice},), torch.ones_like({x})[:1], accumulate=True)",
            f"{x}.put_({at}, {piece})",
        ]
    return draft.choice(forms)
