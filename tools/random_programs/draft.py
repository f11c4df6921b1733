"""A program being drawn: the CPU tensors so far, and what a drawer may ask about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tools.random_programs.program import NAME, Namespace, Step, execute, namespace, tensors

T = TypeVar("T")
Condition = Callable[[torch.Tensor], bool]
# How far a float must be from where a discontinuous operator jumps.
MARGIN = 1e-2


class NoChoice(Exception):
    """No tensor of the draft fits what a drawer needs."""


class Draft:
    """A program being drawn, executed on the CPU as it grows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.steps: list[Step] = []
        self.names: Namespace = namespace("cpu")
        self.count = 0
        self.inexact: set[int] = set()

    # --- choices -------------------------------------------------------------------------------------------------

    def choice(self, values: Sequence[T]) -> T:
        if not values:
            raise NoChoice
        return self.rng.choice(values)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def new(self, count: int = 1) -> str:
        """The names of the next results, as the left side of an assignment."""
        return ", ".join(f"t{self.count + i}" for i in range(count))

    def pick(self, *conditions: Condition) -> str:
        """The name of a live tensor, more likely a late one."""
        fitting = [n for n, t in self._named().items() if all(c(t) for c in conditions)]
        if not fitting:
            raise NoChoice
        return max(self.choice(fitting), self.choice(fitting), key=lambda n: int(n[1:]))

    def _named(self) -> dict[str, torch.Tensor]:
        return {n: v for n, v in self.names.items() if isinstance(v, torch.Tensor)}

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.names[name]
        return found

    def evaluate(self, source: str) -> Any:
        """The value of an expression over the draft's tensors; NoChoice where it has none."""
        scratch = dict(self.names)
        if execute(f"value = {source}", scratch) is not None:
            raise NoChoice
        return scratch["value"]

    def dim(self, name: str) -> int:
        """A dimension, counted from either end."""
        n = self[name].dim()
        if not n:
            raise NoChoice
        return self.rng.randrange(-n, n)

    # --- what is known of values ---------------------------------------------------------------------------------

    def exact(self, t: torch.Tensor) -> bool:
        """Whether both devices hold the same bits."""
        return not (t.is_floating_point() or t.is_complex()) or t.untyped_storage().data_ptr() not in self.inexact

    def away(self, t: torch.Tensor, *points: complex) -> bool:
        """Whether rounding can't take an element to the other side of a point."""
        if self.exact(t):
            return True
        return all(bool(((t - p).abs() > MARGIN).all()) for p in points)

    def away_from_steps(self, t: torch.Tensor, offset: float = 0.0) -> bool:
        """The same for all integers, shifted by `offset`."""
        if self.exact(t):
            return True
        part = (t.detach().double() - offset).remainder(1.0)
        return bool(((part > MARGIN) & (part < 1 - MARGIN)).all())

    # --- growth --------------------------------------------------------------------------------------------------

    def replay(self, steps: Sequence[Step]) -> None:
        """Starts again with these steps."""
        self.names = namespace("cpu")
        self.inexact = set()
        self.steps = []
        for step in steps:
            self.run(step, exact=True)

    def run(self, step: Step, exact: bool) -> Exception | None:
        """Executes a step and appends it.

        Args:
            exact: whether the step moves or makes values without rounding.
        """
        before = {id_: t.clone() for id_, t in _storages(self.names).items()}
        sources_exact = exact and all(self.exact(self[n]) for n in NAME.findall(step.source) if n in self.names)
        error = execute(step.source, self.names)
        for pointer, now in _storages(self.names).items():
            old = before.get(pointer)
            if old is not None and torch.equal(old, now):
                continue
            if sources_exact:
                if old is None:
                    self.inexact.discard(pointer)
            else:
                self.inexact.add(pointer)
        self.steps.append(step)
        return error


def _storages(names: Namespace) -> dict[int, torch.Tensor]:
    """The bytes of every live storage by address."""
    found = {}
    for t in tensors(names).values():
        storage = t.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return found


# --- conditions on tensors -----------------------------------------------------------------------------------------


def is_real(t: torch.Tensor) -> bool:
    return not t.is_complex()


def is_number(t: torch.Tensor) -> bool:
    return t.dtype is not torch.bool


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def is_inexact(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def is_integer(t: torch.Tensor) -> bool:
    return not is_inexact(t)


def has_elements(t: torch.Tensor) -> bool:
    return t.numel() > 0


def has_dims(n: int) -> Condition:
    return lambda t: t.dim() >= n


def finite(t: torch.Tensor) -> bool:
    return bool(t.isfinite().all())


def addresses(t: torch.Tensor) -> list[int]:
    """Where each element begins, in bytes from the start of the storage."""
    offsets = torch.zeros(t.shape, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        offsets += (torch.arange(size) * stride).reshape([-1 if i == d else 1 for i in range(t.dim())])
    places: list[int] = ((offsets + t.storage_offset()) * t.element_size()).reshape(-1).tolist()
    return places


def separate(t: torch.Tensor) -> bool:
    """No two elements share memory."""
    places = addresses(t)
    return len(set(places)) == len(places)


def expanded(t: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))


def writable(t: torch.Tensor) -> bool:
    """A write has one meaning, or is refused."""
    return separate(t) or expanded(t)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one storage holds both, so that the order of reads and writes may matter."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0


def distinct(t: torch.Tensor) -> bool:
    """Every order of the elements is decided, whatever the rounding."""
    flat = t.detach().reshape(-1)
    if t.is_complex() or t.dtype is torch.bool:
        return flat.numel() <= 1
    flat = flat.to(torch.float64)
    if not finite(flat):
        return False
    gaps = flat.sort().values.diff()
    return bool((gaps > MARGIN).all())


def broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `b` can be written into `a`."""
    try:
        return torch.broadcast_shapes(a.shape, b.shape) == a.shape
    except RuntimeError:
        return False
