"""Checks a backward operator under every mask of the gradients that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from tools.compare import Mismatch, assert_same, to_device
from tools.conformance.backward_calls import CALLS, MASK, Call, masked_operators
from tools.conformance.database import Entry
from tools.conformance.outcome import Outcome
from tools.conformance.subject import saying
from tools.samples import spread
from tools.wider import HALF, rounded, widened

CHECKS = ("masks",)
# Sums of some dozens of products.
TOLERANCES = {torch.float32: (1.3e-6, 2e-5)}


class MaskRun:
    """The checks of one entry."""

    def __init__(self, entry: Entry, most: int) -> None:
        self.entry = entry
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.most = most
        self.operator = getattr(getattr(torch.ops.aten, entry.op), entry.variant or "default")
        self.masks = list(product((True, False), repeat=masked_operators()[entry.op]))

    def outcome(self, checks: frozenset[str]) -> Outcome:
        result = Outcome()
        calls, others = (self._calls(seed) for seed in (0, 1))
        for first, second in spread(list(zip(calls, others, strict=True)), self.most):
            result.samples += 1
            if "masks" in checks:
                result.record("masks", first.note, lambda pair=(first, second): self._every_mask(pair))
        return result

    def _calls(self, seed: int) -> Sequence[Call]:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            return values.to(self.dtype).to(torch.float32 if self.dtype in HALF else self.dtype)

        return list(CALLS[self.entry.op, self.entry.variant](draw))

    def _every_mask(self, calls: Sequence[Call]) -> None:
        """With one call's data, then backwards with the other's."""
        for call, masks in zip(calls, (self.masks, self.masks[::-1]), strict=True):
            for mask in masks:
                # With nothing wanted PyTorch does not call it, and some CPU kernels do not take it.
                if any(mask) and not any(mask[i] for i in call.absent):
                    with saying(f"mask {''.join('01'[wanted] for wanted in mask)}"):
                        self._same(call, list(mask))

    def _same(self, call: Call, mask: list[bool]) -> None:
        args = self._in_dtype([mask if a is MASK else a for a in call.args])
        wide = widened(args, self.dtype) if self.dtype in HALF else args
        want = (call.reference or self.operator)(*to_device(wide, "cpu"), **call.kwargs)
        got = self.operator(*to_device(args), **call.kwargs)
        if len(got) != len(want):
            raise Mismatch("structure", f"{len(got)} results instead of {len(want)}")
        for i, (g, w, wanted) in enumerate(zip(got, want, mask, strict=True)):
            if not wanted or w is None:
                continue
            if g is None:
                raise Mismatch("structure", f"gradient {i} is not there")
            rtol, atol = TOLERANCES.get(self.dtype, (None, None))
            with saying(f"gradient {i}"):
                assert_same(g, rounded(w, g)[0], strides=False, rtol=rtol, atol=atol)

    def _in_dtype(self, args: list[Any]) -> list[Any]:
        """The arguments in the entry's dtype; statistics of half precision stay in float32."""
        if self.dtype not in HALF:
            return args
        return [a.to(self.dtype) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args]
