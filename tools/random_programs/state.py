"""What can be seen of a program's tensors at one moment, and how the states of two devices differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.random_programs.program import Namespace, tensors

# How much of the difference that is already there an operator may pass on.
AMPLIFICATION = 50.0
ROUNDING = 16.0
FIELDS = ("dtype", "shape", "strides", "offset", "place", "shares", "is_view")
FIELDS += ("requires_grad", "is_leaf", "conj", "neg")


@dataclass(frozen=True)
class Seen:
    """One tensor.

    Attributes:
        values: on the CPU, contiguous; None where nobody looks at them.
        shares: the first live tensor with the same storage.
        place: how many bytes the first element lies behind that tensor's storage's begin.
    """

    values: torch.Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    place: int
    shares: str
    is_view: bool
    requires_grad: bool
    is_leaf: bool
    version: int
    conj: bool
    neg: bool


Snapshot = dict[str, Seen]


def snapshot(names: Namespace, *, values: bool = True) -> Snapshot:
    """Everything that a program can see of its live tensors."""
    first: dict[int, str] = {}
    seen: Snapshot = {}
    for name, t in tensors(names).items():
        start = t.untyped_storage().data_ptr()
        seen[name] = Seen(
            values=_values(t) if values else None,
            dtype=t.dtype,
            shape=tuple(t.shape),
            # Those that have an effect: CPU kernels choose the others by chance.
            strides=tuple(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1 and t.numel()),
            offset=int(t.storage_offset()) if t.numel() else 0,
            place=t.data_ptr() - start if t.numel() else 0,
            # Storages without memory have no address on the CPU.
            shares=first.setdefault(start, name) if t.numel() else name,
            is_view=t._is_view(),
            requires_grad=t.requires_grad,
            is_leaf=t.is_leaf,
            version=t._version,
            conj=t.is_conj(),
            neg=t.is_neg(),
        )
    return seen


def _values(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu().resolve_conj().resolve_neg()
    return t.clone(memory_format=torch.contiguous_format)


def same(a: Snapshot, b: Snapshot) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and not any(
        a[n].version != b[n].version or _differs(n, a[n], b[n], 0.0, 0.0, 0.0) for n in a
    )


@dataclass(frozen=True)
class Difference:
    """A tensor that differs; `kind` says in what: "values", "dtype", "shape", …"""

    kind: str
    name: str
    message: str


class Comparison:
    """Compares the states of two devices step by step; knows by how much their values may differ by now."""

    def __init__(self) -> None:
        self._apart = 0.0
        self._before: tuple[Snapshot, Snapshot] = ({}, {})

    def differences(self, got: Snapshot, want: Snapshot, steps: int = 1) -> list[Difference]:
        """
        Args:
            steps: how many steps have run since the last comparison.
        """
        if got.keys() != want.keys():
            odd = sorted(got.keys() ^ want.keys())
            return [Difference("names", odd[0], f"{', '.join(odd)} only on one device")]
        floats = [s.values for s in want.values() if s.values is not None and _inexact(s.dtype)]
        largest = max([1.0] + [_largest(v) for v in floats])
        allowed = AMPLIFICATION**steps * self._apart
        # A step that was not compared may have rounded to float32 what this one has as float64.
        coarsest = torch.finfo(torch.float32).eps if steps > 1 else 0.0
        found = [d for name in want if (d := _differs(name, got[name], want[name], allowed, largest * steps, coarsest))]
        found += self._writes(got, want)
        if not found:
            self._apart = max([self._apart] + [_apart(got[n].values, want[n].values) for n in want])
        return found

    def _writes(self, got: Snapshot, want: Snapshot) -> list[Difference]:
        """Where autograd has counted another number of writes since the last time; gradients come and go."""
        states = zip((got, want), self._before, strict=True)
        counts = [{n: now[n].version - old[n].version for n in now if n in old} for now, old in states]
        self._before = (got, want)
        return [
            Difference("writes", name, f"{counts[0][name]} writes were counted instead of {count}")
            for name, count in counts[1].items()
            if "." not in name and counts[0].get(name) != count
        ]


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _largest(t: torch.Tensor) -> float:
    size = t.abs().double()
    finite = size[size.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _apart(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    if got is None or want is None or not _inexact(want.dtype):
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    gap = torch.where(got == want, 0, got.to(wide) - want.to(wide))
    return _largest(gap)


def _differs(name: str, got: Seen, want: Seen, allowed: float, largest: float, coarsest: float) -> Difference | None:
    """The first difference of one tensor, if there is any.

    Args:
        allowed: by how much results may differ because their operands do.
        largest: the magnitude of the operands; 0 asks for the same bits.
        coarsest: the least rounding error to allow for.
    """
    for field in FIELDS:
        if getattr(got, field) != getattr(want, field):
            return Difference(field, name, f"{field} {getattr(got, field)} instead of {getattr(want, field)}")
    if got.values is None or want.values is None:
        return None
    rtol = atol = 0.0
    if _inexact(want.dtype) and largest:
        # Sums are taken in float32 at least, and rounded once to the result's dtype.
        own = max(torch.finfo(want.dtype).eps, coarsest)
        rtol, atol = ROUNDING * own, ROUNDING * min(own, 1.2e-7) * largest**2 + allowed
    if torch.allclose(got.values, want.values, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return Difference("values", name, f"{got.values.tolist()}\ninstead of {want.values.tolist()}")
