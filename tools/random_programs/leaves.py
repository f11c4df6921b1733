"""Steps that make tensors from literals, and the Python numbers that other steps use."""

from __future__ import annotations

import math
from typing import Any

import torch

from tools.random_programs.draft import Draft
from tools.random_programs.kinds import kind

# Few shapes, so that many programs share compiled kernels.
SHAPES = [(), (1,), (4,), (6,), (3, 4), (2, 3), (2, 3, 4), (4, 4), (2, 1, 3), (0,), (0, 3), (2, 0, 2), (2, 3, 2, 2)]
SHAPE_WEIGHTS = [2, 1, 3, 3, 6, 4, 5, 3, 2, 1, 1, 1, 1]
DTYPES = {
    torch.float32: 12,
    torch.float64: 2,
    torch.bfloat16: 2,
    torch.float16: 1,
    torch.int64: 3,
    torch.int32: 2,
    torch.int16: 1,
    torch.int8: 1,
    torch.uint8: 1,
    torch.bool: 2,
    torch.complex64: 2,
    torch.complex128: 1,
}


def dtype(draft: Draft) -> torch.dtype:
    return draft.rng.choices(list(DTYPES), list(DTYPES.values()))[0]


def values(draft: Draft, of: torch.dtype, count: int) -> list[Any]:
    """Numbers that a dtype holds; different ones, and none near a multiple of 1/2, where the dtype has enough."""
    rng = draft.rng
    if of is torch.bool:
        return [rng.random() < 0.5 for _ in range(count)]
    if of.is_complex:
        parts = values(draft, torch.float32, 2 * count)
        return [complex(*parts[2 * i : 2 * i + 2]) for i in range(count)]
    if of.is_floating_point:
        if of.itemsize == 2:
            return [k / 8 for k in rng.sample([k for k in range(-48, 48) if k % 4], count)]
        return [k / 100 for k in rng.sample([k for k in range(-400, 400) if 2 < k % 50 < 48], count)]
    return rng.sample(range(1, 60) if of is torch.uint8 else range(-30, 30), count)


def literal(draft: Draft, shape: tuple[int, ...], of: torch.dtype) -> str:
    """An expression for a tensor on the device."""
    if 0 in shape:
        return f"torch.zeros({shape}, dtype={of}, device=device)"
    flat = values(draft, of, math.prod(shape))
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]
    return f"torch.tensor({flat if shape else flat[0]}, dtype={of}, device=device)"


@kind(4, exact=True)
def leaf(draft: Draft) -> str:
    shape, of = draft.rng.choices(SHAPES, SHAPE_WEIGHTS)[0], dtype(draft)
    source = literal(draft, shape, of)
    if (of.is_floating_point or of.is_complex) and draft.chance(0.5):
        source += ".requires_grad_()"
    return f"{draft.new()} = {source}"


@kind(2, exact=True)
def parameter(draft: Draft) -> str:
    shape = draft.choice([(4,), (3, 4), (2, 3), (2, 3, 4)])
    return f"{draft.new()} = {literal(draft, shape, torch.float32)}.requires_grad_()"


@kind(2, exact=True)
def factory(draft: Draft) -> str:
    """Values without a literal, some of them like another tensor."""
    of = dtype(draft)
    shape = draft.choice(SHAPES)
    like = draft.pick()
    source = draft.choice(
        [
            f"torch.arange({draft.choice([0, 3, 5])}, {draft.choice([5, 6, 12])}, device=device)",
            f"torch.arange(-3, 4, 2, dtype={draft.choice([torch.float32, torch.int32])}, device=device)",
            f"torch.full({shape}, {number(draft, of)}, dtype={of}, device=device)",
            f"torch.zeros_like({like})",
            f"torch.ones_like({like}, dtype={of})",
            f"{like}.new_ones({shape})",
            f"{like}.new_full({shape}, 2)",
            f"torch.eye({draft.choice([2, 3, 4])}, device=device)",
            f"torch.zeros({shape}, dtype={of}, device=device)",
            f"torch.scalar_tensor({number(draft, of)}, dtype={of}, device=device)",
        ]
    )
    return f"{draft.new()} = {source}"


def number(draft: Draft, of: torch.dtype) -> str:
    """A Python number as source text that goes into a tensor of a dtype."""
    if of is torch.bool:
        return draft.choice(["True", "False", "1", "0.0"])
    if of.is_complex:
        return draft.choice(["0.5", "-2", "True", "1j", "(0.5-2j)", "inf"])
    if of.is_floating_point:
        return draft.choice(["0.5", "-2", "True", "3", "-1.75", "inf", "-inf", "nan", "0.125", "0"])
    return draft.choice(["2", "7", "True", "0", "1", "100"])


def scalar(draft: Draft) -> str:
    """A Python number of any kind; some fit no dtype."""
    return draft.rng.choices(
        ["2", "-3", "0.5", "-1.25", "True", "False", "inf", "nan", "(1+2j)", "2**31", "2**40", "2**63", "300", "1e-3"],
        [6, 4, 6, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    )[0]
