"""Draws a program from a seed: step after step, each tried on the CPU and kept if it is worth comparing."""

from __future__ import annotations

import torch

from tools.random_programs import (  # noqa: F401  (they register)
    gradients,
    index,
    leaves,
    operators,
    views,
    writes,
    wrong,
)
from tools.random_programs.draft import Draft, NoChoice
from tools.random_programs.kinds import KINDS
from tools.random_programs.program import Program, Step, tensors
from tools.random_programs.state import Snapshot, same, snapshot

LENGTH = 12
# Lines that the CPU refuses, per program.
REFUSED = 4
MOST_ELEMENTS = 64
MOST_BYTES = 2048
LARGEST = 1e3
# What a drawer gets wrong, or the CPU's kernels lack, rather than what PyTorch refuses.
NO_REFUSAL = (NameError, SyntaxError, AttributeError, NotImplementedError)


def generate(seed: int) -> Program:
    """The program of a seed, always the same."""
    draft = Draft(seed)
    names, weights = list(KINDS), [k.weight for k in KINDS.values()]
    opening = draft.choice([["leaf", "leaf"], ["leaf", "parameter", "differentiable"]])
    refused = 0
    while len(draft.steps) < LENGTH:
        name = opening.pop(0) if opening else draft.rng.choices(names, weights)[0]
        drawer = KINDS[name]
        try:
            source = drawer.draw(draft)
        except NoChoice:
            continue
        before = snapshot(draft.names)
        kept = list(draft.steps)
        try:
            error = draft.run(Step(source, name), drawer.exact)
        except RuntimeError:
            # A view of several outputs whose base was written: not even its gradient may be asked for.
            _replay(draft, kept)
            continue
        if error is None:
            if _comparable(draft):
                draft.count += _made(source)
                continue
        elif refused < REFUSED and _refusal(error, before, draft) and (name in wrong.WRONG or draft.chance(0.4)):
            refused += 1
            draft.steps[-1] = Step(source, name, type(error).__name__)
            continue
        _replay(draft, kept)
    return Program(seed, tuple(draft.steps))


def _made(source: str) -> int:
    left = source.partition(" = ")[0].removesuffix(",")
    return len(left.split(", ")) if " = " in source and "[" not in left and "." not in left else 0


def _replay(draft: Draft, steps: list[Step]) -> None:
    """The state after these steps again."""
    draft.replay([])
    for step in steps:
        draft.run(step, KINDS[step.kind].exact)


def _comparable(draft: Draft) -> bool:
    """Whether everything alive is small, and can be told from its neighbours in spite of rounding."""
    live = tensors(draft.names)
    if len(live) > 16:
        return False
    return all(_ordinary(t) for t in live.values())


def _ordinary(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.dtype not in leaves.DTYPES or t.dim() > 5:
        return False
    if t.numel() > MOST_ELEMENTS or t.untyped_storage().nbytes() > MOST_BYTES:
        return False
    t = t.detach().resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    if not t.is_floating_point():
        return True
    size = t.abs()
    tiny = (size > 0) & (size < 4 * torch.finfo(t.dtype).tiny)
    return not bool(tiny.any()) and bool((size[size.isfinite()] < LARGEST).all())


def _refusal(error: Exception, before: Snapshot, draft: Draft) -> bool:
    """Whether a line was refused as a whole, so that the program can go on as if it were not there."""
    return not isinstance(error, NO_REFUSAL) and same(before, snapshot(draft.names))
