"""Steps that look at the memory of a tensor in another way, and those that copy it into another layout."""

from __future__ import annotations

import math

import torch

from tools.random_programs.draft import Draft, NoChoice, has_dims, has_elements, is_inexact, is_integer
from tools.random_programs.index import index
from tools.random_programs.kinds import kind
from tools.random_programs.leaves import dtype


def _assign(draft: Draft, expression: str) -> str:
    return f"{draft.new()} = {expression}"


@kind(4, exact=True)
def transpose(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    n = draft[x].dim()
    order = draft.rng.sample(range(n), n)
    forms = [
        f"{x}.transpose({draft.dim(x)}, {draft.dim(x)})",
        f"{x}.permute({order})",
        f"{x}.movedim({draft.dim(x)}, {draft.dim(x)})",
    ]
    if n == 2:
        forms.append(f"{x}.t()")
    if n >= 2:
        forms.append(f"{x}.mT")
    return _assign(draft, draft.choice(forms))


@kind(5, exact=True)
def slice_(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    return _assign(draft, f"{x}[{index(draft, draft[x], advanced=False)}]")


@kind(exact=True)
def narrow(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    d = draft.dim(x)
    size = draft[x].shape[d]
    start = draft.rng.randrange(size + 1)
    return _assign(draft, f"{x}.narrow({d}, {start}, {draft.rng.randrange(size - start + 1)})")


@kind(2, exact=True)
def select(draft: Draft) -> str:
    x = draft.pick(has_dims(1), has_elements)
    d = draft.dim(x)
    size = draft[x].shape[d]
    return _assign(draft, f"{x}.select({d}, {draft.rng.randrange(-size, size)})")


@kind(2, exact=True)
def expand(draft: Draft) -> str:
    x = draft.pick(lambda t: t.dim() <= 3)
    shape = [draft.choice([2, 3]) if size == 1 else draft.choice([size, -1]) for size in draft[x].shape]
    added = draft.choice([[], [2], [1], [2]])
    return _assign(draft, f"{x}.expand({added + shape})")


def _refold(draft: Draft, count: int) -> list[int]:
    """Sizes with this product."""
    options = [[count], [1, count], [count, 1]]
    options += [[k, count // k] for k in (2, 3, 4, 6) if count % k == 0]
    if count % 4 == 0:
        options.append([2, count // 4, 2])
    shape = draft.choice(options)
    if count and draft.chance(0.3):
        shape[draft.rng.randrange(len(shape))] = -1
    return shape


@kind(4, exact=True)
def reshape(draft: Draft) -> str:
    x = draft.pick()
    form = draft.choice(["{x}.reshape({s})", "{x}.reshape({s})", "{x}.view({s})", "{x}.flatten()", "torch.ravel({x})"])
    return _assign(draft, form.format(x=x, s=_refold(draft, draft[x].numel())))


@kind(2, exact=True)
def as_strided(draft: Draft) -> str:
    x = draft.pick(has_elements, lambda t: not t.is_conj())
    room = draft[x].untyped_storage().nbytes() // draft[x].element_size()
    shape = draft.choice([[2], [3], [2, 2], [2, 3], [3, 2], [2, 1, 2]])
    strides = [draft.choice([0, 1, 1, 2, 2, 3, 4, 6]) for _ in shape]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if reach >= room and draft.chance(0.9):
        raise NoChoice
    offset = draft.choice(["", f", {draft.rng.randrange(max(1, room - reach))}"])
    return _assign(draft, f"{x}.as_strided({shape}, {strides}{offset})")


@kind(exact=True)
def unfold(draft: Draft) -> str:
    x = draft.pick(has_dims(1), lambda t: t.dim() <= 3)
    return _assign(draft, f"{x}.unfold({draft.dim(x)}, {draft.choice([1, 2, 3])}, {draft.choice([1, 2])})")


@kind(2, exact=True)
def diagonal(draft: Draft) -> str:
    x = draft.pick(has_dims(2))
    first, second = draft.rng.sample(range(draft[x].dim()), 2)
    return _assign(draft, f"{x}.diagonal({draft.choice([0, 0, 1, -1])}, {first}, {second})")


@kind(2, exact=True)
def squeeze(draft: Draft) -> str:
    x = draft.pick()
    forms = [f"{x}.squeeze()", f"{x}.unsqueeze({draft.choice([0, -1])})", f"{x}[None]", f"{x}[..., None]"]
    if draft[x].dim():
        forms += [f"{x}.squeeze({draft.dim(x)})", f"{x}.unflatten({draft.dim(x)}, (-1, 1))"]
    return _assign(draft, draft.choice(forms))


@kind(2, exact=True)
def pieces(draft: Draft) -> str:
    x = draft.pick(has_dims(1), has_elements)
    d = draft.dim(x)
    size = draft[x].shape[d]
    form, count = draft.choice(
        [
            (f"{x}.split({max(1, size // 2)}, {d})", math.ceil(size / max(1, size // 2))),
            (f"{x}.split([1, {size - 1}], {d})", 2),
            (f"{x}.chunk(2, {d})", min(2, size)),
            (f"{x}.unbind({d})", size),
            (f"{x}.tensor_split(3, {d})", 3),
        ]
    )
    if not 1 < count <= 3:
        raise NoChoice
    return f"{draft.new(count)} = {form}"


@kind(2, exact=True)
def complex_parts(draft: Draft) -> str:
    x = draft.pick(is_inexact)
    t = draft[x]
    if t.is_complex():
        forms = [f"{x}.real", f"{x}.imag", f"{x}.conj()", f"torch.view_as_real({x}.resolve_conj())", f"{x}.mH"]
    else:
        forms = [f"torch.view_as_complex({x})", f"{x}.real", f"{x}.conj()"]
    return _assign(draft, draft.choice(forms))


# Dtypes of which every bit pattern that occurs is an ordinary number of the other.
RETYPES = {
    torch.float32: [torch.int32, torch.uint8, torch.int16],
    torch.float64: [torch.int64, torch.int32],
    torch.bfloat16: [torch.int16],
    torch.float16: [torch.int16, torch.uint8],
    torch.int64: [torch.int32, torch.int16, torch.uint8],
    torch.int32: [torch.int64, torch.int16, torch.uint8],
    torch.int16: [torch.int32, torch.int8],
    torch.int8: [torch.uint8, torch.int16],
    torch.uint8: [torch.int8, torch.int32],
    torch.bool: [torch.uint8],
    torch.complex64: [torch.float32, torch.int32],
    torch.complex128: [torch.float64],
}


@kind(2, exact=True)
def view_dtype(draft: Draft) -> str:
    x = draft.pick(lambda t: draft.exact(t) and t.dim() > 0 and not t.requires_grad and not t.is_conj())
    return _assign(draft, f"{x}.view({draft.choice(RETYPES[draft[x].dtype])})")


@kind(2, exact=True)
def view_bits(draft: Draft) -> str:
    """A write through a view of another dtype, in one line."""
    x = draft.pick(lambda t: draft.exact(t) and t.dim() > 0 and not t.requires_grad and not t.is_conj(), is_integer)
    as_dtype = draft.choice([d for d in RETYPES[draft[x].dtype] if d.itemsize <= draft[x].dtype.itemsize])
    write = draft.choice(["fill_(1)", "bitwise_and_(1)", "zero_()", "[..., ::2].fill_(1)"])
    return f"{x}.view({as_dtype}).{write}".replace(".[", "[")


@kind(2, exact=True)
def alias(draft: Draft) -> str:
    x = draft.pick()
    return _assign(draft, draft.choice([f"{x}.detach()", f"{x}[:]", f"{x}[...]", f"{x}.view({x}.shape)", f"{x}.data"]))


@kind(exact=True)
def forget(draft: Draft) -> str:
    if len(draft.names) < 9:
        raise NoChoice
    return f"del {draft.pick()}"


# --- copies --------------------------------------------------------------------------------------------------------


@kind(3, exact=True)
def copy(draft: Draft) -> str:
    x = draft.pick()
    forms = [f"{x}.clone()", f"{x}.contiguous()", f"{x}.clone(memory_format=torch.contiguous_format)"]
    if draft[x].dim() == 4:
        forms += [f"{x}.{name}(memory_format=torch.channels_last)" for name in ("contiguous", "clone")]
        forms.append(f"{x}.to(memory_format=torch.channels_last)")
    return _assign(draft, draft.choice(forms))


@kind(2, exact=True)
def flip(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    d = draft.dim(x)
    forms = [f"{x}.flip({d})", f"{x}.roll({draft.choice([1, -2])}, {d})", f"{x}.repeat_interleave(2, {d})"]
    if draft[x].dim() == 2:
        forms += [f"torch.rot90({x})", f"{x}.repeat(2, 1)", f"{x}.tril()", f"{x}.triu(1)"]
    return _assign(draft, draft.choice(forms))


@kind(3, exact=True)
def join(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    d = draft.dim(x)
    shape = list(draft[x].shape)
    y = draft.pick(lambda t: list(t.shape) == shape)
    return _assign(
        draft,
        draft.choice(
            [
                f"torch.cat([{x}, {y}], {d})",
                f"torch.cat([{y}, {x}.narrow({d}, 0, {shape[d] // 2})], {d})",
                f"torch.stack([{x}, {y}], {draft.choice([0, -1])})",
                f"torch.hstack([{x}, {y}])",
            ]
        ),
    )


@kind(3)
def convert(draft: Draft) -> str:
    x, target = draft.pick(), dtype(draft)
    if not may_convert(draft, draft[x], target):
        raise NoChoice
    return _assign(draft, f"{x}.to({target})")


def may_convert(draft: Draft, t: torch.Tensor, target: torch.dtype) -> bool:
    """Whether a conversion has one result on every device."""
    if target.is_floating_point or target.is_complex or is_integer(t):
        return True
    part = t.detach().real if t.is_complex() else t.detach()
    if target is torch.bool:
        return draft.away(t, 0)
    largest = 120.0
    smallest = 0.0 if target is torch.uint8 else -largest
    return bool(((part > smallest) & (part < largest)).all()) and draft.exact(t) | draft.away_from_steps(part)
