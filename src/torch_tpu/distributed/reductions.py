"""Reductions of `torch.distributed` on host memory: what gloo does of them, and what is done before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp

# The names of functional collectives.
BY_NAME = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
# Reduced in another dtype, which holds every sum of two. Unsigned 64-bit integers have none.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
# Those of true and false.
_OF_BOOL = {"sum": "max", "product": "min", "avg": "", "premul_sum": ""}
_BITWISE = ("band", "bor", "bxor")


@dataclass(frozen=True)
class Reduction:
    """A reduction of tensors of one dtype.

    Attributes:
        name: as functional collectives call it, or "premul_sum".
        factor: what each rank's operand is multiplied by first.
        size: how many ranks there are.
    """

    name: str
    factor: float | torch.Tensor | None
    size: int

    def __str__(self) -> str:
        return self.name

    def of_gloo(self, dtype: torch.dtype) -> Any:
        """The reduction that gloo is asked for.

        Raises:
            RuntimeError: there is none for this dtype.
        """
        name = _OF_BOOL.get(self.name, self.name) if dtype is torch.bool else self.name
        floats = dtype.is_floating_point or dtype.is_complex
        if (
            not name
            or (name in _BITWISE and floats)
            or (name in ("avg", "premul_sum") and not floats)
            or dtype is torch.uint64
            or (dtype.is_complex and name not in ("sum", "avg", "premul_sum"))
            or (dtype.is_floating_point and dtype.itemsize == 1)
        ):
            raise RuntimeError(
                f"there is no {self.name.upper()} of {str(dtype).removeprefix('torch.')} tensors over processes. "
                "Convert them first, for example with .float() or .long()."
            )
        return BY_NAME["sum" if name in ("avg", "premul_sum") else name]

    def operand(self, given: torch.Tensor) -> torch.Tensor:
        """A copy of a rank's tensor, in a dtype that gloo has, into which gloo may write."""
        dtype = given.dtype
        if dtype is torch.bool:
            return given.view(torch.uint8).clone()
        if dtype.is_complex:
            given = torch.view_as_real(given)
        if self.factor is not None:
            return given * self.factor
        if self.name == "avg" and self._divides_exactly:
            return given / self.size
        return given.to(_WIDER.get(dtype, given.dtype), copy=True)

    def is_copied(self, dtype: torch.dtype) -> bool:
        """Whether `operand` is more than the tensor itself."""
        return self.factor is not None or self.name == "avg" or dtype in _WIDER

    def finish(self, reduced: torch.Tensor, result: torch.Tensor) -> Callable[[], None] | None:
        """What is left to do when gloo is done: `reduced` becomes the result."""
        divide = self.name == "avg" and not self._divides_exactly

        def after() -> None:
            if divide:
                reduced.div_(self.size)
            if reduced.data_ptr() != result.data_ptr():
                result.copy_(as_dtype(reduced, result))

        return after

    @property
    def _divides_exactly(self) -> bool:
        # By a power of two; then each rank's part is divided, which costs no pass over the result, and the sum of
        # large numbers in half precision stays finite.
        return self.size & (self.size - 1) == 0


def as_dtype(reduced: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What gloo reduced, in the dtype and shape of the result."""
    if result.dtype is torch.bool:
        return reduced.view(torch.bool)
    if result.dtype.is_complex:
        return torch.view_as_complex(reduced)
    return reduced


def reduction(op: Any, size: int) -> Reduction:
    """A reduction from its name, or from a `ReduceOp` with what it carries."""
    if isinstance(op, str):
        if op not in BY_NAME:
            raise ValueError(f"{op!r} is no reduction; known are {', '.join(BY_NAME)}")
        return Reduction(op, None, size)
    if op == ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return Reduction("premul_sum", factor.cpu() if isinstance(factor, torch.Tensor) else factor, size)
    name = next((name for name, known in BY_NAME.items() if op == known), None)
    if name is None:
        raise ValueError(f"{op} is no reduction that the tpu device knows")
    return Reduction(name, None, size)
